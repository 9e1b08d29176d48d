"""Formats of torch: zip archives, legacy files from before torch 1.6, packages."""

"""Formats of torch: zip archives, legacy files of torch before 1.6, packages."""

"""Schemas of architectures and layouts of engines, as data."""

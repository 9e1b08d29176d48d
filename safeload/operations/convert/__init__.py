"""Conversion: decide what becomes of each tensor, make it, write it."""

"""Conversion: decide how each tensor is converted, make the tensor, write it."""

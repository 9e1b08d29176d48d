"""Orbax checkpoints: a tree of zarr arrays, in an OCDBT database or in folders."""

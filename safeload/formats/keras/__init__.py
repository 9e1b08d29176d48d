"""Keras files: HDF5 by its structure (hdf5.py), chunks (chunks.py), ``.keras`` archives and sharded weights."""

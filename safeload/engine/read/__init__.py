"""Tensors of files as arrays: columns, read plans, and the batches that execute the plans."""

"""Inputs of operations: catalogs of tensors, their descriptions, and pieces of work for executors."""

"""Tensors of files as arrays: the columns, the plan, the batch that reads them."""

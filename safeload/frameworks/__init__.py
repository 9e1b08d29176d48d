"""Tensors of torch and arrays of JAX: no other package of safeload imports these libraries."""

"""Arrays of other libraries: nothing else in safeload imports torch or JAX."""

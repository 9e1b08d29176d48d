"""Read pickles safely: a pickle machine that builds inert values, and the globals of pickled NumPy arrays."""

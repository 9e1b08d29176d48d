"""Pickles without unpickling: a machine that builds inert values, and what numpy puts into pickles."""

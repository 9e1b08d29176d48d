"""Digests, signatures, and what pickles name."""

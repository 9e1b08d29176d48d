"""Digests, signatures, and the scan of pickles."""

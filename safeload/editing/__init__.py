"""Files changed in place, and patches."""

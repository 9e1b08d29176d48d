"""Data transfer: jobs, threads, conversions, atomic writes."""

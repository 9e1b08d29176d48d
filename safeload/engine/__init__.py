"""Bytes on their way: jobs, threads, conversions, files under construction."""

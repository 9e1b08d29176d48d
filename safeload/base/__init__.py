"""Nouns: the C core, dtypes, tables, files, text."""

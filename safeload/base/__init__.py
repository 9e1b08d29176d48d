"""The lowest layer: the C core, dtypes, tables, arrays, paths, text."""

"""Other formats, dtypes, names and layouts."""

"""Other formats, dtypes, names and layouts."""

# Of records of origin; here, where readers import nothing else. See `origin`.
ORIGIN_KEY, ORIGIN_NAME = "origin", "origin.json"

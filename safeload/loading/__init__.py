"""From a path to an open checkpoint, or to arrays, with adapters merged into them."""

"""The HTML page about a checkpoint."""

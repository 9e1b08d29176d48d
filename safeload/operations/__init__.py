"""Verbs over checkpoints and dicts."""

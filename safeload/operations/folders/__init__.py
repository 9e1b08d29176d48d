"""Destination folders: local folders and stores, shards, unfinished conversions."""

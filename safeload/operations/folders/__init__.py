"""Destination folders: local folders and stores, shards, records of complete shards, unfinished notes."""

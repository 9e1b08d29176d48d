"""Destination folders: shards, the journal of an unfinished conversion, local folders and stores."""

"""Reads pickles safely: a pickle machine that builds inert values, and the globals that numpy puts into pickles."""

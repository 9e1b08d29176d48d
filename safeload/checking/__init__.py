"""Checks, statistics, differences, lists and reports."""

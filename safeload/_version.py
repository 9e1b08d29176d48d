"""The version, in a file of its own, which the build reads without importing the package."""

__version__ = "0.1.0"

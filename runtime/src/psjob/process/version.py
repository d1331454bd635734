"""The runtime's version; one place, read by the package's metadata too."""

__version__ = "0.1.0"

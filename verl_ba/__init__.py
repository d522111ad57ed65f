"""Balanced Aggregation for verl. Importing this package has no side effect and loads neither verl nor Ray."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("verl-ba")
except PackageNotFoundError:  # a checkout on PYTHONPATH, without an installation
    __version__ = "0+unknown"

__all__ = ["__version__"]

"""Release number of this package: the same as `version` in pyproject.toml. Pure."""

__version__ = "0.1.0"

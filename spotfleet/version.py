"""Release number of this package, the same as `version` in pyproject.toml, and how it is installed. Pure."""

__version__ = "0.1.0"

PUBLISHED = False  # whether PyPI has this package; until then pip does not find it by its name


def install(extra: str = "") -> str:
    """Return the command that installs the package, with one of its extras."""
    extras = f"[{extra}]" if extra else ""
    if PUBLISHED:
        return f"pip install 'spotfleet{extras}'"
    return (f"pip install '.{extras}'   (in a clone of spotfleet; from a wheel: "
            f"pip install './spotfleet-{__version__}-py3-none-any.whl{extras}')")


def upgrade() -> str:
    """Return the commands that install the newest release."""
    return ("`pip install --upgrade spotfleet`" if PUBLISHED else
            "`git pull` and `pip install .` in your clone of spotfleet")

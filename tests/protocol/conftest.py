"""A user in front of the command line: see `cli_user.py`."""

from tests.support.cli.cli_user import up, user  # noqa: F401

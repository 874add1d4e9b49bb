"""Arguments and options of several commands, and the lazy import of a command's code."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after the command has printed what continues it."""


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class CostOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


class SimulationOutput(StrEnum):
    TABLE = "table"
    JSON = "json"
    HTML = "html"


Name = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet; may be left out when there is only one.",
                                     show_default=False)]
Cluster = Annotated[str, typer.Option("-c", "--cluster", metavar="FLEET", show_default=False,
                                      help="The fleet; may be left out when there is only one.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
Format = Annotated[Output, typer.Option("-o", "--output", help="json: for programs.")]
Watch = Annotated[bool, typer.Option("-w", "--watch", help="Go on until interrupted.")]
Host = Annotated[str, typer.Argument(help="A host's name or address, as `status` shows them.", show_default=False)]

Everywhere = Annotated[bool, typer.Option("--all", help="Every worker host.")]
OnHost = Annotated[str, typer.Option("--host", metavar="HOST", show_default=False,
                                     help="w0, w1 ..., a host's name or address; default: the dispatcher's machine.")]
TAIL = "spotfleet.tail"  # key in a context: the words after `--`


class Tailed(TyperCommand):
    """Command that keeps the words after `--` apart, for another program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[TAIL], args = args[at + 1:], args[:at]
        return super().parse_args(ctx, args)


def call(module: str, function: str, *values: Any, **options: Any) -> None:
    """Import a module of `commands`, or of the folder in its name, and call its function."""
    folder = "" if "." in module else "commands."
    getattr(importlib.import_module(f"spotfleet.cli.{folder}{module}"), function)(*values, **options)

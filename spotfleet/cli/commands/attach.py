"""The command `attach`."""

from __future__ import annotations

from pathlib import Path

from spotfleet.api.home import Home
from spotfleet.api.lifecycle.attach import attach as attach_fleet
from spotfleet.cli.console import next_command, print_message
from spotfleet.config import load
from spotfleet.errors import UsageError
from spotfleet.words import counted


def attach(name: str, provider: str, file: Path | None) -> None:
    asked = load(file).spec if file else None
    if asked and provider and provider != asked.provider:
        raise UsageError(f"--provider {provider}: {file} says that the fleet is on {asked.provider}",
                         hint="leave --provider out")
    where = asked.provider if asked else provider or "local"
    done = attach_fleet(Home(), name or (asked.name if asked else ""), where, asked)
    print_message(f"fleet {done.fleet} is attached: {counted(done.hosts, 'machine')} on {where}")
    if done.note:
        print_message(f"note: {done.note}")
    next_command(f"spotfleet status {done.fleet}", f"spotfleet cost {done.fleet}", f"spotfleet down {done.fleet}")

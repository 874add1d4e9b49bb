"""The command `attach`."""

from __future__ import annotations

from pathlib import Path

from spotfleet.api.attach import attach as attach_here
from spotfleet.api.house import House
from spotfleet.cli.talk import next_command, say
from spotfleet.config import load
from spotfleet.errors import UsageError


def attach(name: str, provider: str, file: Path | None) -> None:
    asked = load(file).spec if file else None
    if asked and provider and provider != asked.provider:
        raise UsageError(f"--provider {provider}: {file} says that the fleet is on {asked.provider}",
                         hint="leave --provider out")
    where = asked.provider if asked else provider or "local"
    done = attach_here(House(), name or (asked.name if asked else ""), where, asked)
    say(f"fleet {done.fleet} is attached: {done.hosts} machines of it live on {where}")
    if done.note:
        say(f"note: {done.note}")
    next_command(f"spotfleet status {done.fleet}", f"spotfleet cost {done.fleet}", f"spotfleet down {done.fleet}")

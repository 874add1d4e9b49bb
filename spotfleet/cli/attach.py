"""The command `attach`."""

from __future__ import annotations

from spotfleet.api.attach import attach as attach_here
from spotfleet.api.house import House
from spotfleet.cli.talk import next_command, say


def attach(name: str, provider: str) -> None:
    done = attach_here(House(), name, provider)
    say(f"fleet {done.fleet} is attached: {done.hosts} machines of it live on {provider}")
    if done.note:
        say(f"note: {done.note}")
    next_command(f"spotfleet status {done.fleet}", f"spotfleet cost {done.fleet}", f"spotfleet down {done.fleet}")

"""The command `leaks`."""

from __future__ import annotations

import json
import time

import typer

from spotfleet.api.house import House
from spotfleet.api.leaks import Search, Suspect, Verdict, end, search
from spotfleet.cli.render import dollars, span, table
from spotfleet.cli.talk import confirm, next_command, say, step
from spotfleet.codec import to_json


def leaks(*, fix: bool, yes: bool, as_json: bool) -> None:
    house = House()
    found = search(house)
    _show(found, as_json)
    if not found.leaks:
        _where_else(found)
        return
    if not fix:
        next_command("spotfleet leaks --fix   (ends them)", *_attach(found))
        raise typer.Exit(1)
    if not confirm(f"End these {len(found.leaks)} machines?" if len(found.leaks) > 1 else "End this machine?", yes):
        raise typer.Exit(1)
    end(house, found.leaks, step)
    say(f"ended: {', '.join(s.machine for s in found.leaks)}")


def _show(found: Search, as_json: bool) -> None:
    for note in found.notes:
        say(f"note: {note}")
    if as_json:
        print(json.dumps(to_json(found.suspects), indent=1))
    elif found.suspects:
        print(table(["machine", "fleet", "role", "pool", "since", "$/h", "verdict", "why"],
                    [_row(s) for s in found.suspects], right=["$/h"]))
    burn = sum(s.micros_h for s in found.leaks)
    say(f"{len(found.leaks)} of {found.listed} machines are leaks" + (f", {dollars(burn)}/h" if burn else ""))


def _row(s: Suspect) -> tuple[str, ...]:
    since = f"{span(max(0.0, time.time() - s.since))} ago" if s.since else "-"
    return (s.machine, s.fleet, s.role.value, s.pool, since, dollars(s.micros_h), s.verdict.value, s.why)


def _where_else(found: Search) -> None:
    if commands := _attach(found):
        next_command(*commands)


def _attach(found: Search) -> list[str]:
    others = dict.fromkeys((s.fleet, s.provider) for s in found.suspects if s.verdict is Verdict.ELSEWHERE)
    return [f"spotfleet attach {fleet}" + (f" --provider {provider}" if provider != "local" else "")
            for fleet, provider in others]

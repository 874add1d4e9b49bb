"""The command `leaks`."""

from __future__ import annotations

import json
import time

import typer

from spotfleet.api.account.leaks import LeakSearch, Ownership, ResourceItem, Suspect, end, search
from spotfleet.api.home import Home
from spotfleet.cli.console import confirm, next_command, print_message, print_step
from spotfleet.cli.render import span
from spotfleet.cli.tables import table
from spotfleet.codec import to_json
from spotfleet.words import counted, dollars


def leaks(*, fix: bool, yes: bool, as_json: bool, everywhere: bool) -> None:
    home = Home()
    found = search(home, everywhere)
    _show(found, as_json)
    if not found.leaks and not found.left:
        _where_else(found)
        return
    if not fix:
        again = "spotfleet leaks --fix --all-regions" if everywhere else "spotfleet leaks --fix"
        next_command(f"{again}   (ends them)", *_attach(found))
        raise typer.Exit(1)
    if not confirm(_question(found), yes):
        raise typer.Exit(1)
    end(home, found.leaks, print_step, found.left, everywhere)
    print_message(f"ended: {', '.join([*(s.machine for s in found.leaks), *(f'{t.kind} {t.id}' for t in found.left)])}")


def _question(found: LeakSearch) -> str:
    machines, things = len(found.leaks), len(found.left)
    if not things:
        return f"End these {machines} machines?" if machines > 1 else "End this machine?"
    ended = f"End {counted(machines, 'machine')} and remove" if machines else "Remove"
    return f"{ended} {counted(things, 'thing')}?"


def _show(found: LeakSearch, as_json: bool) -> None:
    for note in found.notes:
        print_message(f"note: {note}")
    if as_json:
        print(json.dumps(to_json((*found.suspects, *found.things)), indent=1))
    if found.suspects and not as_json:
        print(table(["machine", "fleet", "role", "pool", "since", "$/h", "verdict", "why"],
                    [_row(s) for s in found.suspects], right=["$/h"], words="why",
                    drop=["role", "since", "pool", "$/h"]))
    if found.things and not as_json:
        print(table(["thing", "id", "region", "fleet", "state", "since", "verdict", "why"],
                    [_line(t) for t in found.things], words="why", drop=["state", "since", "region"]))
    if not (found.listed or found.suspects or found.things):
        print_message("nothing of any fleet is listed")
        return
    price = sum(s.micros_h for s in found.leaks)
    verb = "is a leak" if len(found.leaks) == 1 else "are leaks"
    costs = f", {dollars(price)}/h" if price else ""
    print_message(f"{len(found.leaks)} of {counted(found.listed, 'machine')} {verb}{costs}"
                  + (f"; and {counted(len(found.left), 'other thing')}" if found.left else ""))


def _row(s: Suspect) -> tuple[str, ...]:
    return (s.machine, s.fleet, s.role.value, s.pool, _ago(s.since), dollars(s.micros_h), s.verdict.value, s.why)


def _line(t: ResourceItem) -> tuple[str, ...]:
    return (t.kind, t.id, t.region or "-", t.fleet, t.state or "-", _ago(t.since), t.verdict.value, t.why)


def _ago(since: float) -> str:
    return f"{span(max(0.0, time.time() - since))} ago" if since else "-"


def _where_else(found: LeakSearch) -> None:
    if commands := _attach(found):
        next_command(*commands)


def _attach(found: LeakSearch) -> list[str]:
    others = dict.fromkeys((s.fleet, s.provider) for s in found.suspects if s.verdict is Ownership.ELSEWHERE)
    return [f"spotfleet attach {fleet}" + (f" --provider {provider}" if provider != "local" else "")
            for fleet, provider in others]

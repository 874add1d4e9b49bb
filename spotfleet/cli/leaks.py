"""The command `leaks`."""

from __future__ import annotations

import json
import time

import typer

from spotfleet.api.house import House
from spotfleet.api.leaks import Search, Suspect, Thing, Verdict, end, search
from spotfleet.cli.render import dollars, span, table
from spotfleet.cli.talk import confirm, next_command, say, step
from spotfleet.codec import to_json


def leaks(*, fix: bool, yes: bool, as_json: bool, everywhere: bool) -> None:
    house = House()
    found = search(house, everywhere)
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
    end(house, found.leaks, step, found.left, everywhere)
    say(f"ended: {', '.join([*(s.machine for s in found.leaks), *(f'{t.kind} {t.id}' for t in found.left)])}")


def _question(found: Search) -> str:
    machines, things = len(found.leaks), len(found.left)
    if not things:
        return f"End these {machines} machines?" if machines > 1 else "End this machine?"
    what = f"{things} thing{'' if things == 1 else 's'}"
    return f"{f'End {machines} machine(s) and remove' if machines else 'Remove'} {what}?"


def _show(found: Search, as_json: bool) -> None:
    for note in found.notes:
        say(f"note: {note}")
    if as_json:
        print(json.dumps(to_json((*found.suspects, *found.things)), indent=1))
    if found.suspects and not as_json:
        print(table(["machine", "fleet", "role", "pool", "since", "$/h", "verdict", "why"],
                    [_row(s) for s in found.suspects], right=["$/h"]))
    if found.things and not as_json:
        print(table(["thing", "id", "region", "fleet", "state", "since", "verdict", "why"],
                    [_line(t) for t in found.things]))
    if not (found.listed or found.suspects or found.things):
        say("nothing of any fleet is listed")
        return
    burn = sum(s.micros_h for s in found.leaks)
    say(f"{len(found.leaks)} of {found.listed} machines are leaks" + (f", {dollars(burn)}/h" if burn else "")
        + (f"; and {len(found.left)} other thing{'' if len(found.left) == 1 else 's'}" if found.left else ""))


def _row(s: Suspect) -> tuple[str, ...]:
    return (s.machine, s.fleet, s.role.value, s.pool, _ago(s.since), dollars(s.micros_h), s.verdict.value, s.why)


def _line(t: Thing) -> tuple[str, ...]:
    return (t.kind, t.id, t.region or "-", t.fleet, t.state or "-", _ago(t.since), t.verdict.value, t.why)


def _ago(since: float) -> str:
    return f"{span(max(0.0, time.time() - since))} ago" if since else "-"


def _where_else(found: Search) -> None:
    if commands := _attach(found):
        next_command(*commands)


def _attach(found: Search) -> list[str]:
    others = dict.fromkeys((s.fleet, s.provider) for s in found.suspects if s.verdict is Verdict.ELSEWHERE)
    return [f"spotfleet attach {fleet}" + (f" --provider {provider}" if provider != "local" else "")
            for fleet, provider in others]

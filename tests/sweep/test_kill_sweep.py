"""Killed anywhere, nothing is lost and nothing is left: `python -m tests.sweep.kill_sweep` tries every state."""

from __future__ import annotations

import os
import shutil

import pytest

from spotfleet.api.machine import DispatcherMachine
from spotfleet.fleet.domain.events import FleetDown, LaunchIntended
from spotfleet.fleet.ledger import Ledger
from tests.support.sweep.sweep_flows import FLOWS, Point, kill, points
from tests.support.sweep.sweep_world import World
from tests.sweep.kill_sweep import table

PART = 1 if os.environ.get("SPOTFLEET_LONG") else 32  # one state of so many, in each run others


def test_wherever_a_flow_is_killed_the_next_run_leaves_nothing_lost_doubled_or_orphaned():
    lines: list[object] = []
    bad = table(part=PART, tell=lines.append)
    print("\n" + "\n".join(map(str, lines)))
    assert not bad, "\n\n".join(bad)


def test_a_dispatcher_whose_end_was_written_down_and_never_asked_for_does_not_stay_beside_the_next_one():
    kill(point("laptop", "down of half an up", "ledger TerminateIntended"))


def test_the_sweep_finds_a_machine_that_is_written_down_only_once_it_is_listed(monkeypatch):
    append = Ledger.append

    def forgetful(ledger, *events):
        return append(ledger, *(e for e in events if not isinstance(e, LaunchIntended) or e.why.startswith("adopted")))

    monkeypatch.setattr(Ledger, "append", forgetful)
    with pytest.raises(AssertionError, match="a machine that no ledger knows"):
        kill(point("dispatcher", "up", "call launch"))


def test_the_sweep_finds_an_end_that_is_written_down_twice(monkeypatch):
    def close(machine, why):
        ledger = Ledger(machine.folder.ledger)
        ledger.append(FleetDown(1.0, why))
        ledger.close()
        machine.folder.forget_secrets()
        machine.folder.update(down_at=1.0, url="")

    monkeypatch.setattr(DispatcherMachine, "close", close)
    with pytest.raises(AssertionError, match="down more than once"):
        kill(point("laptop", "down", "ledger FleetDown"))


def point(victim: str, name: str, what: str) -> Point:
    """Just after the first `what` of that flow."""
    flow = next(f for f in FLOWS if (f.victim, f.name) == (victim, name))
    return next(p for p in points(flow) if p.after and p.what == what)


def test_a_world_whose_disks_another_process_removes_says_so():
    with World() as world:
        shutil.rmtree(world.root)
        with pytest.raises(AssertionError, match="another process has removed"):
            world.laptop(lambda: world.house.folder("digits").record)

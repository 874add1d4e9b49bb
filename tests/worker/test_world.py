"""A member of a job whose engine is not torch: any factory of worlds will do, and no torch is imported for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

from spotfleet.protocol.messages import Assignment
from spotfleet.worker.member import Member, RankInfo

WITHOUT_TORCH = """
import importlib, pkgutil, sys
import spotfleet.worker
sys.modules["torch"] = None  # importing it fails
for module in pkgutil.iter_modules(spotfleet.worker.__path__, "spotfleet.worker."):
    importlib.import_module(module.name)
"""


class Barrier:
    """A world of one: nothing travels."""

    def __init__(self, assignment: Assignment) -> None:
        self.generation = assignment.generation
        self.forming = self.aborted = self.change_waits = False
        self.listens = ""
        self.on_unreached: Callable[[tuple[str, ...]], None] = lambda peers: None
        self.retired = False

    def form(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def retire(self) -> threading.Thread:
        self.retired = True
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread

    def descriptors(self) -> list[int]:
        return []


def test_a_script_started_by_hand_has_a_world_of_its_own_from_whatever_factory_it_was_given():
    asked: list[tuple[Assignment, str]] = []

    def make(assignment: Assignment, address: str) -> Barrier:
        asked.append((assignment, address))
        return Barrier(assignment)

    member = Member(make, {"SPOTFLEET_WORKER": "h/0/1", "SPOTFLEET_ADDRESS": "10.0.0.7"})
    member.init()
    assert asked == [(Assignment(0, 0, ("h/0/1",), ""), "10.0.0.7")]
    assert isinstance(member.group, Barrier) and (member.place, member.placed) == (RankInfo(), True)


def test_a_world_that_is_left_as_planned_is_retired_when_the_next_one_has_formed():
    member = Member(lambda assignment, address: Barrier(assignment), {})
    member.init()
    left = member.retiring = member.group
    assert not left.retired
    member.retire_old()
    assert left.retired and not left.aborted and member.retiring is None


def test_what_any_engines_worker_needs_is_imported_without_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=60)

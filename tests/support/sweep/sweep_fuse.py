"""Where a process can be killed: before and after each call to a provider, each write of a ledger and each change of
its own files. In one process, so the kill is an exception that nobody may catch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from spotfleet.fleet.domain.events import Event
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import BillingRules, CloudHost, Need, Offer, PricePoint
from spotfleet.providers import LaunchRequest, Provider

LAPTOP, DISPATCHER, NOBODY = "laptop", "dispatcher", ""
RANDOM = re.compile(r"-[0-9a-f]{4}$")  # end of the name of an earlier fleet's folder
DEAD_PID = 1 << 22  # above every pid that Linux gives


class Killed(BaseException):
    """The process died here."""


class Fuse:
    """Kills `victim` before or after its n-th effect. Until its next life nothing that it still tries takes effect."""

    def __init__(self) -> None:
        self.actor = NOBODY  # whose code runs now
        self.victim, self.at, self.after = NOBODY, 0, False
        self.effects: list[str] = []  # effects of the victim, since the fuse was lit
        self.dead = False
        self.lives = 0  # kills so far
        self.witness: Callable[[], None] = lambda: None  # called at the moment of a kill
        self.passed: Callable[[int, bool], None] = lambda at, after: None  # called before and after each effect

    def light(self, victim: str, at: int = 0, after: bool = False) -> None:
        """From now on count the effects of `victim`; kill it at number `at`, or never for 0."""
        self.victim, self.at, self.after, self.effects = victim, at, after, []

    def revive(self) -> None:
        self.dead, self.at = False, 0

    def burn(self, what: str, effect: Callable[[], Any]) -> Any:
        if self.actor != self.victim or self.actor == NOBODY:
            return effect()
        if self.dead:
            raise Killed(what)
        self.effects.append(what)
        if (number := len(self.effects)) != self.at:
            self.passed(number, False)
            try:
                return effect()
            finally:
                self.passed(number, True)
        try:
            if self.after:
                effect()
        finally:
            self.dead, self.lives = True, self.lives + 1
            self.witness()
            raise Killed(what)


class TappedProvider:
    """`cloud`, each call of which is an effect."""

    def __init__(self, cloud: Provider, fuse: Fuse) -> None:
        self.name, self._cloud, self._fuse = cloud.name, cloud, fuse

    def _call(self, method: str, *args: Any) -> Any:
        return self._fuse.burn(f"call {method}", lambda: getattr(self._cloud, method)(*args))

    def check(self) -> None:
        self._call("check")

    def billing(self) -> BillingRules:
        return self._call("billing")

    def offers(self, need: Need) -> list[Offer]:
        return self._call("offers", need)

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        return self._call("prices", pools, since)

    def launch(self, request: LaunchRequest) -> None:
        self._call("launch", request)

    def hosts(self, fleet: str) -> list[CloudHost]:
        return self._call("hosts", fleet)

    def terminate(self, request_id: str) -> None:
        self._call("terminate", request_id)

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        self._call("tag", request_id, tags)

    def boot_files(self, request_id: str) -> dict[str, str]:
        return self._call("boot_files", request_id)

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        self._call("interrupt", request_id, notice_s)


@contextmanager
def tapped_writes(fuse: Fuse, under: Path) -> Iterator[None]:
    """Each write of a ledger, and each file or folder below `under` that takes its place or goes, is an effect."""
    made, append = Ledger.__init__, Ledger.append
    rmtree = shutil.rmtree

    def make(ledger: Ledger, path: Path | str) -> None:
        try:
            fuse.burn("ledger opened", lambda: made(ledger, path))
        except Killed:
            if hasattr(ledger, "_db"):
                ledger._db.close()  # as the kernel does
            raise
        ledger._db.execute("PRAGMA synchronous=OFF")  # processes die here, machines keep their power

    def write(ledger: Ledger, *events: Event) -> int:
        if not events:
            return append(ledger)
        kinds = "+".join(dict.fromkeys(type(e).__name__ for e in events))
        return fuse.burn(f"ledger {kinds}", lambda: append(ledger, *events))

    def tapped(verb: str) -> Callable[..., Any]:
        plain = getattr(Path, verb)

        def act(path: Path, *args: Any, **options: Any) -> Any:
            if not path.is_relative_to(under) or (verb == "unlink" and not path.exists()):
                return plain(path, *args, **options)
            named = path if verb == "unlink" else Path(args[0])
            what = RANDOM.sub("", named.name)  # the same in each run
            return fuse.burn(f"file {verb} {what}", lambda: plain(path, *args, **options))

        return act

    def remove(path: Path | str, *args: Any, **options: Any) -> None:
        if not Path(path).is_relative_to(under) or not Path(path).exists():
            rmtree(path, *args, **options)
        else:
            fuse.burn("file rmtree", lambda: rmtree(path, *args, **options))

    with ExitStack() as patches:
        patches.enter_context(patch.object(Ledger, "__init__", make))
        patches.enter_context(patch.object(Ledger, "append", write))
        for verb in ("replace", "rename", "unlink"):
            patches.enter_context(patch.object(Path, verb, tapped(verb)))
        patches.enter_context(patch.object(shutil, "rmtree", remove))
        patches.enter_context(patch.object(os, "fsync", lambda _descriptor: None))
        patches.enter_context(patch.object(os, "getpid", lambda: DEAD_PID + fuse.lives))
        yield

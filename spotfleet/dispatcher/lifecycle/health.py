"""Health of the dispatcher's machine: lasting problems, reported in the fleet's `why`."""

from __future__ import annotations

from collections.abc import Iterable

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import space
from spotfleet.fleet.domain.events import Event, FileDamaged, HistoryLost, ResultsLost
from spotfleet.words import clock_utc, results

DAMAGE_S, NAMED = 86_400.0, 3  # `status` names the last damaged files of a day and lost results, the events name all

class HealthRemarks:
    """Remarks for users about disk, ledger and waiting results."""

    def __init__(self, core: Core, stays: bool, past: Iterable[Event]) -> None:
        """`stays`: our machine outlives the fleet, and its results wait there until they are fetched. `past`: the
        events until now."""
        self._core, self._stays = core, stays
        self._lost: HistoryLost | None = None
        self._damaged: list[FileDamaged] = []
        for event in past:
            if isinstance(event, HistoryLost):
                self._lost = event
            elif isinstance(event, FileDamaged):
                self._damaged.append(event)

    def observe(self, news: list[FileDamaged]) -> list[FileDamaged]:
        """Report damaged files from now on; returns them."""
        self._damaged += news
        return news

    def lines(self) -> list[str]:
        full = space.why(self._core.home)
        if not full and self._core.journal.full is not None:
            full = space.full_message(self._core.home)
        lines = [f"{full}; new jobs are refused, logs and checkpoints wait for room, training goes on"] if full else []
        if self._lost is not None:
            lines.append(f"the ledger was damaged and is kept as {self._lost.kept_as}: what had ended before "
                         f"{clock_utc(self._lost.at)} may be missing")
        if lost := self._core.journal.state.lost:
            named = [f"{results(e.what, e.bytes, e.job)} {_where(e)}" for e in lost[-NAMED:]]
            more = [f"{len(lost) - NAMED} more (`spotfleet events`)"] if len(lost) > NAMED else []
            lines.append("not collected: " + ", ".join([*named, *more]))
        fresh = [e for e in self._damaged if self._core.unix() - e.at < DAMAGE_S]
        lines += [f"{e.file}: {e.text}" for e in fresh[-NAMED:]]
        if len(fresh) > NAMED:
            lines.append(f"{len(fresh) - NAMED} more damaged files: `spotfleet events` lists them")
        if self._stays and self._core.journal.state.down is not None:
            lines.append("its results wait on the dispatcher's machine: `spotfleet down` copies them here")
        return lines


def _where(lost: ResultsLost) -> str:
    return f"(a copy is in {lost.kept_at})" if lost.kept_at else f"(lost with {lost.host})"

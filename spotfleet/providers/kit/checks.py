"""Checks before a first fleet, run all at once: of the account, and of each region that the fleet may go to.

Each result is yielded once those before it are known. Of several regions one is enough: a blocker in the others becomes
a warning. A check that the cloud does not answer is a warning: the fleet may go on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers import Finding

THREADS = 24

W = TypeVar("W")
Ask = Callable[[], Iterable[Finding]]


def findings(account: Mapping[str, Ask], regions: Iterable[str], want: Callable[[str], W],
             regional: Mapping[str, Callable[[W], Iterable[Finding]]],
             denied: Callable[[SpotfleetError], bool]) -> Iterator[Finding]:
    """Yield the results of all checks, by the subject of each.

    `want(region)` reads what the checks of one region share. `denied`: an error that only means that the caller may not
    look.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        wants = {region: pool.submit(want, region) for region in regions}
        shared = [pool.submit(_answered, about, ask, denied) for about, ask in account.items()]
        local = {region: [pool.submit(_answered, about, lambda ask=ask, wanted=wanted: ask(wanted.result()), denied)
                          for about, ask in regional.items()] for region, wanted in wants.items()}
        for future in shared:
            yield from future.result()
        yield from _of_regions(local)


def _of_regions(local: Mapping[str, list[Future[list[Finding]]]]) -> Iterator[Finding]:
    if len(local) == 1:
        for futures in local.values():
            for future in futures:
                yield from future.result()
        return
    answers = {region: [f for future in futures for f in future.result()] for region, futures in local.items()}
    free = [region for region, found in answers.items() if not any(f.level == "blocker" for f in found)]
    for f in dict.fromkeys(f for found in answers.values() for f in found):
        soft = bool(free) and f.level == "blocker"
        yield replace(f, level="warning", what=f"{f.what} ({free[0]} is free)") if soft else f


def _answered(about: str, ask: Ask, denied: Callable[[SpotfleetError], bool]) -> list[Finding]:
    try:
        return [replace(f, about=f.about or about) for f in ask()]
    except NeedsPerson as error:
        unseen = denied(error)
        return [Finding(f"cannot be looked at: {error}" if unseen else str(error), "warning" if unseen else "blocker",
                        error.hint, about)]
    except SpotfleetError as error:
        return [Finding(f"cannot be looked at: {error}", "warning", error.hint or "try again", about)]

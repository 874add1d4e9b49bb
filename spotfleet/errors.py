"""Errors, one class per reaction. Each carries a `hint`: the next thing to try.

    SpotfleetError                exit 1   something failed; the message gives the reason
    |-- UsageError                exit 2   invalid input: file, line, key, nearest valid word
    |-- NeedsPerson               exit 3   credentials, permissions, a limit of resources: only a person can continue
    |-- NoSuchFleet               exit 1   no fleet of that name; `status` lists the fleets
    |-- NoCapacity                exit 1   a pool, type or region refuses now (`scope`); try elsewhere or later
    |-- DispatcherUnreachable     exit 1   it may come back by itself: callers retry, then report
    |-- DiskFull                 exit 1   a disk is full: nothing is lost, callers retry
    |-- NoticeFormat              exit 1   a metadata server sent an unknown format: keep watching
    `-- JobFailed                 exit 1   the user's script failed; the message holds its traceback
"""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpotfleetError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(SpotfleetError):
    exit_code = 2


class NeedsPerson(SpotfleetError):
    exit_code = 3


class NoSuchFleet(SpotfleetError):
    pass


class NoCapacity(SpotfleetError):
    """Refusal of a launch for lack of capacity.

    `scope` is "pool", "type", "quota" (`Offer.quota`), "region" or "account"; all in it cools down. `pools` holds
    the refusing pools of a launch that named several; empty: the first.
    """

    def __init__(self, message: str, *, hint: str = "", scope: str = "pool", pools: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.scope, self.pools = scope, pools


class DispatcherUnreachable(SpotfleetError):
    pass


class DiskFull(SpotfleetError):
    pass


def is_full(error: BaseException) -> bool:
    """Return whether `error` means a full disk."""
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in FULL)


class NoticeFormat(SpotfleetError):
    pass


class JobFailed(SpotfleetError):
    pass


def room(free_bytes: int, total_bytes: int) -> str:
    """Format free space, such as "12.5 MB of 1.5 GB free"."""
    free, total = (f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB" for n in (free_bytes, total_bytes))
    return f"{free} of {total} free"

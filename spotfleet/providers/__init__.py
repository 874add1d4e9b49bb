"""The Provider contract and how plugins are found. SDKs are imported inside methods.

A provider is a thin shell over one cloud. The contract, checked for every provider by `tests/contract`:

1. `launch` is idempotent under `request.request_id`: asked twice, even at once, there is one host. It returns
   when the cloud has accepted; it raises NoCapacity (with its scope) or NeedsPerson, and then no host exists.
2. Everything created bears the fleet's tag from the moment of its creation.
3. `hosts` lists every host of the fleet, also ended ones for some time, with `runs` as the cloud bills them.
   Listings may lag by seconds and repeat lines; callers cope. `hosts("")` lists those of every fleet of the account.
4. `terminate` of an unknown or ended host is no error. It returns when the cloud has accepted.
5. `prices` gives the price in force at `since` and every later change, oldest first, per pool.
6. `tag` sets tags of a live host, which the host reads from its metadata server; `boot_files` gives back what a host
   was told at its birth, to whoever holds the account's credentials. Both raise UsageError for an unknown host.
7. No method keeps state in the process: any process with the same configuration may call any of them, also several
   threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol

from spotfleet.errors import UsageError
from spotfleet.model import BillingRules, CloudHost, Need, Offer, PricePoint, Role

DISPATCHER_TAG = "spotfleet-dispatcher"  # on worker hosts: URL of the dispatcher, once it is not the one of their birth


@dataclass(frozen=True)
class Boot:
    """What a new host runs: `python -m MODULE --home DIR`, with `files` (name -> text, mode 0600) in DIR.

    The process finds its place in the environment: SPOTFLEET_HOST_ADDRESS, SPOTFLEET_HOST_PORT (where a
    dispatcher listens) and SPOTFLEET_METADATA_URL.
    """

    module: str
    files: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LaunchRequest:
    request_id: str
    fleet: str
    role: Role
    offer: Offer
    boot: Boot
    interruption_behavior: str = "terminate"
    tags: dict[str, str] = field(default_factory=dict)


class Provider(Protocol):
    name: str

    def check(self) -> None:
        """Return if hosts can be launched; NeedsPerson says what a person must do first."""

    def billing(self) -> BillingRules: ...

    def offers(self, need: Need) -> list[Offer]:
        """What is sold now and satisfies `need`, at current prices; [] when nothing does."""

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]: ...

    def launch(self, request: LaunchRequest) -> None: ...

    def hosts(self, fleet: str) -> list[CloudHost]: ...

    def terminate(self, request_id: str) -> None: ...

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        """Set these tags beside those that the host has."""

    def boot_files(self, request_id: str) -> dict[str, str]:
        """`Boot.files` of its launch. Holds secrets."""

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        """Make the cloud take this host, `notice_s` seconds after a notice, or at once for None. For chaos."""


def names() -> list[str]:
    """Of the installed plugins, sorted."""
    return sorted(e.name for e in entry_points(group="spotfleet.providers"))


def load(name: str, config: dict[str, str]) -> Provider:
    """The provider plugin `name`, from the entry points of group spotfleet.providers."""
    found = {e.name: e for e in entry_points(group="spotfleet.providers")}
    if name not in found:
        raise UsageError(f"unknown provider '{name}'", hint=f"use one of: {', '.join(sorted(found))}")
    return found[name].load()(config)

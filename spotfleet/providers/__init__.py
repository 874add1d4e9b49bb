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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from spotfleet.errors import UsageError
from spotfleet.model import BillingRules, CloudHost, FleetSpec, Need, Notice, Offer, PricePoint, Rates, Role

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
    # Pools that are as good as `offer` to the planner: a cloud that knows its capacity may choose among all of them.
    # The listing says which it took. Asked again, a request bears the same ones.
    alternatives: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Belonging:
    """Something of a fleet in the cloud that is no host: a group, a profile, a volume, an open request."""

    kind: str  # the cloud's word: "security-group", "spot-instances-request", "instance-profile" ...
    id: str
    region: str  # "" where it has none
    fleet: str  # as its tag says
    since: float = 0.0  # made at; 0: the cloud does not say
    state: str = ""  # where the kind has states


@dataclass(frozen=True)
class Finding:
    """What `check` found out about one thing."""

    what: str  # what was looked at, and what was found
    # "ok", "warning", "blocker" (a person must act before a fleet can come up), or "absent": the provider is not set up
    # here, which is a blocker to whoever wants it alone.
    level: str = "ok"
    fix: str = ""  # what to do, a line per step; of all but "ok"
    about: str = ""  # one or two words: "credentials", "vCPU quota"


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


@runtime_checkable
class ExistingMachines(Protocol):
    """What a provider of machines that exist before the fleet has besides: whose key opens them must be arranged."""

    def machines(self) -> list[str]:
        """The names of those that there are now, as messages call them; a script may name others tomorrow."""

    def admit(self, fleet: str, public_key: str) -> list[str]:
        """From the laptop: let the fleet's own key open every machine. What went wrong, a line per machine; [] if
        nothing did. Idempotent."""

    def part(self, fleet: str) -> list[str]:
        """From the laptop: leave nothing of `fleet` on any machine, its key included. What is left, a line per
        machine; [] if nothing is. Idempotent."""

    def troubles(self) -> list[str]:
        """What keeps machines that have no host from having one now, and the list of machines from being up to date; a
        line each."""


@runtime_checkable
class Furnished(Protocol):
    """What a provider has besides whose hosts need things that are no hosts: networks, permissions, requests."""

    def prepare(self, fleet: str, tags: Mapping[str, str], tell: Callable[[str], None]) -> None:
        """From the laptop, before the first launch: make what hosts need, each thing bearing the fleet's tag and
        `tags` from its creation. Idempotent; NeedsPerson where it may not. `tell` gets a line per thing made."""

    def open_door(self, fleet: str, tell: Callable[[str], None]) -> None:
        """From the laptop, of a fleet that was prepared: let it in over SSH from where it is now. Idempotent."""

    def belongings(self, fleet: str, everywhere: bool = False) -> list[Belonging]:
        """Everything with the fleet's tag, "" for every fleet, that is no host and is not gone; in every region of the
        account if `everywhere`. What no fleet's tag is on is never listed."""

    def regions(self, everywhere: bool = False) -> list[str]:
        """Where `hosts` and `belongings` look; with `everywhere` all that are enabled for the account."""

    def within(self, regions: Sequence[str]) -> Furnished:
        """The same account, looked at in these regions."""

    def kinds(self) -> list[str]:
        """Of what `belongings` looks for, in the order in which it can be removed."""

    def discard(self, belonging: Belonging) -> None:
        """Remove it; no error if it is gone. SpotfleetError while something else still uses it: ask again."""

    def findings(self, spec: FleetSpec | None) -> Iterable[Finding]:
        """For `check`: may a fleet like `spec`, or any, be made here? Changes nothing. Each as soon as it is known."""


@runtime_checkable
class Sells(Protocol):
    """What a provider has besides that sells more than `offers` of any one need shows."""

    def unknown(self, needs: Sequence[Need]) -> str:
        """Which words of `needs` name nothing on sale, with the nearest that do; "" if each is known."""


@runtime_checkable
class Meters(Protocol):
    """What a provider has besides that charges for more than machines: disks, public addresses, traffic."""

    def rates(self, region: str) -> Rates:
        """What `region` charges now; `Rates()` where nobody knows. Asked for once a day, and stamped into a ledger."""


@runtime_checkable
class Gangs(Protocol):
    """What a provider has besides that launches several hosts together or not at all."""

    def launch_together(self, requests: Sequence[LaunchRequest]) -> None:
        """`launch` of all, which are of one pool and differ in request_id and boot alone; raises as `launch` does, and
        then none of them exists. Idempotent under their request_ids together."""


@dataclass(frozen=True)
class Heard:
    """What a cloud says by itself about one machine."""

    provider_id: str
    notice: Notice | None = None  # None: its state changes, so a look at the listing is due


@runtime_checkable
class Hears(Protocol):
    """What a provider has besides whose cloud says by itself what it is about to do, beside what hosts hear."""

    def hear(self, fleet: str, wait_s: float) -> list[Heard]:
        """What was said since the last call, also of machines that are not the fleet's; waits up to `wait_s` for
        something. It may be said twice, or not at all; what is not understood is left out."""

    def hears(self) -> bool:
        """Is there anything to listen to, as this fleet is configured?"""


def names() -> list[str]:
    """Of the installed plugins, sorted."""
    return sorted(e.name for e in entry_points(group="spotfleet.providers"))


def load(name: str, config: dict[str, str]) -> Provider:
    """The provider plugin `name`, from the entry points of group spotfleet.providers."""
    found = {e.name: e for e in entry_points(group="spotfleet.providers")}
    if name not in found:
        raise UsageError(f"unknown provider '{name}'", hint=f"use one of: {', '.join(sorted(found))}")
    return found[name].load()(config)

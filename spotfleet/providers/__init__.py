"""Provider contract. SDKs are imported inside methods. A provider is opened by its plugin: `plugin.py`.

A provider is a thin shell over one cloud. `tests/providers/contract` checks this contract for every provider:

1. `launch` is idempotent under `request.request_id`: two calls, even concurrent ones, make one host. It returns
   when the cloud has accepted. If it raises NoCapacity (with its scope) or NeedsPerson, no host exists.
2. Everything created carries the fleet's tag from its creation.
3. `hosts` lists every host of the fleet, ended ones for some time too, with `runs` as the cloud bills them.
   Listings may lag by seconds and repeat lines; callers cope. `hosts("")` lists the hosts of all fleets of the account.
4. `terminate` of an unknown or ended host is no error. It returns when the cloud has accepted.
5. `prices` returns the price in force at `since` and every later change, oldest first, per pool.
6. `tag` sets tags of a live host, which the host reads from its metadata server. `boot_files` returns the files that a
   host was launched with, to any caller with the account's credentials. Both raise UsageError for an unknown host.
7. No method keeps state in the process: any process with the same configuration may call any of them, also several
   threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from spotfleet import plugins
from spotfleet.model import BillingRules, CloudHost, FleetSpec, Need, Notice, Offer, PricePoint, Rates, Role

UNLISTED = "machines missing from the list"  # a key of ExistingMachines.remove_fleet
DISPATCHER_TAG = "spotfleet-dispatcher"  # on worker hosts: URL of the dispatcher, if it differs from the one at launch


@dataclass(frozen=True)
class Boot:
    """Start command and files of a new host: `python -m MODULE --home DIR`, with `files` (name -> text, 0600) in DIR.

    The process reads its place from the environment: SPOTFLEET_HOST_ADDRESS, SPOTFLEET_HOST_PORT (where a
    dispatcher listens) and SPOTFLEET_METADATA_URL.
    """

    module: str
    files: dict[str, str] = field(default_factory=dict, repr=False)
    # The host's token, as it stands in `files`: with it a provider may let the host fetch it from its dispatcher
    # (`bootstrap/gang.py`) instead of putting it into the text that all machines of a launch get.
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class LaunchRequest:
    """Request for one host."""

    request_id: str  # FLEET-N, FLEET-GROUP-N for a host of a named group, FLEET-d-N for a dispatcher
    fleet: str
    role: Role
    offer: Offer
    boot: Boot
    interruption_behavior: str = "terminate"
    tags: dict[str, str] = field(default_factory=dict)
    # Pools that the planner rates equal to `offer`: a cloud that knows its capacity may choose among all of them.
    # The listing shows the chosen one. A repeated request carries the same alternatives.
    alternatives: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class Resource:
    """A cloud resource of a fleet that is no host: a group, a profile, a volume, an open request."""

    kind: str  # the cloud's term: "security-group", "spot-instances-request", "instance-profile" ...
    id: str
    region: str  # "" where it has none
    fleet: str  # from its tag
    since: float = 0.0  # creation time; 0: the cloud does not give it
    state: str = ""  # for kinds with states


@dataclass(frozen=True)
class Finding:
    """One result of `check`."""

    what: str  # the subject and the result
    # "ok", "warning", "blocker" (a person must act before a fleet can come up), or "absent": the provider is not set up
    # here, which is a blocker only for users of this provider.
    level: str = "ok"
    fix: str = ""  # what to do, one line per step; for every level but "ok"
    about: str = ""  # subject in one or two words: "credentials", "vCPU quota"


class Provider(Protocol):
    """Interface of a provider plugin; the module's docstring is its contract."""

    name: str

    def check(self) -> None:
        """Return if hosts can be launched; NeedsPerson names what a person must do first."""

    def billing(self) -> BillingRules: ...

    def offers(self, need: Need) -> list[Offer]:
        """List current offers that satisfy `need`, at current prices; [] if there is none."""

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]: ...

    def launch(self, request: LaunchRequest) -> None: ...

    def hosts(self, fleet: str) -> list[CloudHost]: ...

    def terminate(self, request_id: str) -> None: ...

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        """Add these tags to the host's tags."""

    def boot_files(self, request_id: str) -> dict[str, str]:
        """Return `Boot.files` of its launch. Holds secrets."""

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        """Make the cloud take this host, `notice_s` seconds after a notice, or at once for None. For chaos tests."""


@runtime_checkable
class ExistingMachines(Protocol):
    """Extra methods of a provider whose machines exist before the fleet: the fleet's key must be installed on them.

    A machine has the same unique name in all results, in messages and as the zone of its offer.
    """

    def machines(self) -> list[str]:
        """List the names of the current machines; a script may list others tomorrow."""

    def install_key(self, fleet: str, public_key: str) -> dict[str, str]:
        """Install the fleet's public key on every machine; called on the laptop. Idempotent.

        Returns the machines that failed, name -> why.
        """

    def remove_fleet(self, fleet: str) -> dict[str, str]:
        """Remove everything of `fleet` from every machine, its key included; called on the laptop. Idempotent.

        Returns the machines with leftovers, name -> why. UNLISTED stands for those that a failed script did not name.
        """

    def problems(self) -> list[str]:
        """List the problems that keep free machines from having a host, or the machine list from being current.

        One line each.
        """


@runtime_checkable
class ManagedResources(Protocol):
    """Extra methods of a provider whose hosts need other resources: networks, permissions, requests."""

    def prepare(self, fleet: str, tags: Mapping[str, str], progress: Callable[[str], None]) -> None:
        """Create the resources that hosts need; called on the laptop before the first launch. Idempotent.

        Each resource carries the fleet's tag and `tags` from its creation. NeedsPerson if permission is missing.
        `progress` receives one line per created resource.
        """

    def allow_ssh_from_here(self, fleet: str, progress: Callable[[str], None]) -> None:
        """Allow SSH from the laptop's current address, for a prepared fleet. Idempotent."""

    def list_resources(self, fleet: str, everywhere: bool = False) -> list[Resource]:
        """List all existing resources with the fleet's tag that are no hosts; "" means every fleet.

        With `everywhere`, in every region of the account. A resource without a fleet's tag is never listed.
        """

    def regions(self, everywhere: bool = False) -> list[str]:
        """List the regions of `hosts` and `list_resources`; with `everywhere` all that are enabled for the account."""

    def in_regions(self, regions: Sequence[str]) -> ManagedResources:
        """Return the same account, limited to these regions."""

    def resource_kinds(self) -> list[str]:
        """List the resource kinds of `list_resources`, in a valid order of removal."""

    def delete_resource(self, resource: Resource) -> None:
        """Remove it; no error if it is gone. SpotfleetError while something else still uses it: retry later."""

    def findings(self, spec: FleetSpec | None) -> Iterable[Finding]:
        """Check whether a fleet like `spec`, or any, can be made here; changes nothing. Yields results as they come."""


@dataclass(frozen=True)
class MachineImage:
    """An image that `spotfleet image build` made."""

    id: str
    name: str
    region: str  # "" where images belong to no region
    kind: str  # "gpu" or "cpu"
    recipe: str  # version of what it has: bootstrap/image.py
    version: str  # version of spotfleet that made it
    since: float  # creation time, Unix seconds
    disk_gib: int


@runtime_checkable
class MachineImages(Protocol):
    """Extra methods of a provider whose plugin has an `image_recipe`."""

    def images(self) -> list[MachineImage]:
        """List the images that `spotfleet image build` made in the regions of the configuration, newest first."""

    def delete_image(self, image: MachineImage) -> None:
        """Remove it and its disk; no error if it is gone."""


@runtime_checkable
class OfferValidation(Protocol):
    """Extra method of a provider with more on sale than the `offers` of any one need."""

    def unknown(self, needs: Sequence[Need]) -> str:
        """Name the words in `needs` that match nothing on sale, with the nearest valid ones; "" if all are known."""


@runtime_checkable
class RateSource(Protocol):
    """Extra method of a provider that charges for more than machines: disks, public addresses, traffic."""

    def rates(self, region: str) -> Rates:
        """Return the current charges of `region`; `Rates()` if unknown. Called once a day, and stored in a ledger."""


@runtime_checkable
class CloudClock(Protocol):
    """Extra method of a provider whose answers carry the time of the cloud, by which it bills."""

    def cloud_time(self) -> float:
        """Return the cloud's time, Unix seconds, from an answer to this call. Works with any clock on this machine."""


@runtime_checkable
class GroupLaunch(Protocol):
    """Extra method of a provider that launches several hosts together or not at all."""

    def launch_together(self, requests: Sequence[LaunchRequest]) -> None:
        """Launch all requests or none; they share one pool and differ only in request_id and boot.

        Raises as `launch` does, and then none of the hosts exists. Idempotent under the request_ids together.
        """


@dataclass(frozen=True)
class CloudEvent:
    """An event that the cloud sent about one machine."""

    provider_id: str
    notice: Notice | None = None  # None: its state changes, so the listing must be read


@runtime_checkable
class InterruptionEvents(Protocol):
    """Extra methods of a provider whose cloud sends interruption events, besides the notices to hosts."""

    def poll_events(self, fleet: str, wait_s: float) -> list[CloudEvent]:
        """Return the events since the last call, also of other fleets' machines; wait up to `wait_s` for one.

        An event may come twice, or never; unknown events are dropped.
        """

    def has_events(self) -> bool:
        """Return whether this configuration has an event source."""


def names() -> list[str]:
    """List the installed providers, sorted."""
    return plugins.names()


def load(name: str, config: Mapping[str, Any]) -> Provider:
    """Open provider `name` with this configuration. UsageError for an unknown one."""
    return plugins.load(name).open(dict(config))

"""Several clouds in one fleet: a plugin and a provider made of theirs.

The name of such a provider is the names of its parts, "cirrus+cumulus", the dispatcher's default first. Its section of
the spec and its configuration hold a list of them; a part reads only its own:

    FleetSpec.section   {"clouds": [{"plugin": NAME, "section": {...}}, ...]}
    configuration       {"clouds": [{"plugin": NAME, "config": {...}, "left_out": WHY}, ...], "dispatcher": NAME,
                         and the fleet's keys}

An offer names its cloud, so a launch goes to that one; a host's request_id does not, so its end goes to the clouds that
list it. A cloud that fails to answer hides no offers of the others. But a listing without it would show its hosts as
gone: there its error counts.

The dispatcher is on one of the clouds, whose machines have credentials for it. For the others it gets those that their
sections name, and their SDKs (`beside`). `up` leaves a cloud out (`left_out`) that cannot be used from here, if the
fleet can do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spotfleet import plugins
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import BillingRules, CloudHost, FleetSpec, Need, Offer, PricePoint, Rates
from spotfleet.plugins import Base, FileFacts, Machines, Note, RegionRow, Sdk, Traits
from spotfleet.providers import (
    CloudClock,
    CloudEvent,
    Finding,
    GroupLaunch,
    InterruptionEvents,
    LaunchRequest,
    ManagedResources,
    OfferValidation,
    Provider,
    RateSource,
    Resource,
)

Config = dict[str, Any]
KEYS = ("public_key", "secret", "private_key")  # the fleet's, which the core adds to a configuration
CLOUDS, DISPATCHER, LEFT_OUT = "clouds", "dispatcher", "left_out"
NOWHERE = "none"  # in place of the region of a cloud that is left out


def for_part(spec: FleetSpec, name: str) -> FleetSpec:
    """Return the spec as the one cloud `name` would have it: its section, its needs, the dispatcher if it is there."""
    sections = {cloud["plugin"]: cloud["section"] for cloud in spec.section.get(CLOUDS, ())}
    here = tuple(need for need in spec.any_of if need.provider in ("", name))
    dispatcher = spec.dispatcher if spec.dispatcher.provider in ("", name) else Need(use_spot=False)
    return replace(spec, provider=name, section=sections.get(name, {}), any_of=here or (Need(provider=name),),
                   dispatcher=dispatcher)


def merged(traits: Sequence[Traits]) -> Traits:
    """Return the traits of clouds together: what one of them needs, all get; only what all can do is promised."""
    kinds = [t.machines for t in traits]
    return Traits(
        Machines.MADE if Machines.MADE in kinds else kinds[0], any(t.settles_region for t in traits),
        any(t.open_ended_types for t in traits), all(t.placement for t in traits), max(t.poll_s for t in traits),
        max(t.boot_limit_s for t in traits), max(t.keeps_results_s for t in traits),
        min(t.notice_poll_s for t in traits), frozenset.intersection(*(t.takes for t in traits)))


class SeveralPlugin:
    """Plugin of several clouds (`CloudPlugin`): each question goes to the parts."""

    policies = None  # each cloud prints its own
    cost_export = None  # and sends its own bill
    user_key = "user"
    sdk = Sdk()

    def __init__(self, parts: Sequence[Any]) -> None:
        if wrong := next((p.name for p in parts if p.traits.machines is Machines.EXISTING), ""):
            raise UsageError(f"machines of provider {wrong} exist before the fleet: no cloud joins them in one",
                             hint=f"a fleet of {wrong} alone, or of clouds")
        self.name = plugins.JOINED.join(p.name for p in parts)
        self.traits = merged([p.traits for p in parts])
        self._parts = {p.name: p for p in parts}

    # ---- the fleet file

    def section(self) -> None:
        return None

    def read_section(self, given: object, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        """Return the list of the parts' sections; `given`: name -> its section in the file."""
        sections = given if isinstance(given, dict) else {}
        return {CLOUDS: [{"plugin": name, "section": dict(
            part.read_section(sections.get(name), facts.of(name), note))} for name, part in self._parts.items()]}

    def base_keys(self, base: Base) -> Mapping[str, Any]:
        return {}

    def base_contract(self, provider: Provider, name: str) -> str:
        raise UsageError(f"a base is of one cloud, and the fleet is on {' and '.join(self._parts)}",
                         hint="a fleet file for one cloud")

    def adjusted(self, spec: FleetSpec, facts: FileFacts, note: Note) -> FleetSpec:
        return spec

    def portable(self, spec: FleetSpec) -> FleetSpec:
        return self._sections(spec, lambda part, own: part.portable(own))

    def with_access(self, spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
        return self._sections(spec, lambda part, own: part.with_access(own, for_part(asked, part.name)))

    def _sections(self, spec: FleetSpec, change: Callable[[Any, FleetSpec], FleetSpec]) -> FleetSpec:
        return replace(spec, section={CLOUDS: [
            {"plugin": name, "section": change(part, for_part(spec, name)).section}
            for name, part in self._parts.items()]})

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        return "; ".join(f"{name}: {text}" for name, part in self._parts.items()
                         if (text := part.unpriced(for_part(spec, name), hosts)))

    # ---- the configuration

    def open(self, config: Config) -> Provider:
        parts = self.parts(config)
        lacking = [self._lacking(config, name, own) for name, own in parts]
        return SeveralClouds({name: self._parts[name].open(own) for name, own in parts}, [e for e in lacking if e])

    def parts(self, config: Config) -> list[tuple[str, Config]]:
        """Return the names and configurations of the parts that are not left out, each with the fleet's keys."""
        keys = {key: config[key] for key in KEYS if key in config}
        kept = [cloud for cloud in config.get(CLOUDS, ()) if LEFT_OUT not in cloud]
        return [(cloud["plugin"], {**cloud["config"], **self._beside(cloud["plugin"], kept), **keys}) for cloud in kept]

    def _beside(self, name: str, kept: Sequence[Config]) -> Config:
        """Return the SDKs that a dispatcher on cloud `name` needs for the others."""
        sdks = [self._parts[cloud["plugin"]].sdk for cloud in kept if cloud["plugin"] != name]
        extras, modules = [e for sdk in sdks for e in sdk.extras], [m for sdk in sdks for m in sdk.modules]
        return {"beside": {"extras": extras, "modules": modules}} if extras or modules else {}

    def config(self, spec: FleetSpec, environ: Mapping[str, str], home: str) -> Config:
        return {DISPATCHER: spec.dispatcher.provider or next(iter(self._parts)), CLOUDS: [
            {"plugin": name, "config": part.config(for_part(spec, name), environ, home)}
            for name, part in self._parts.items()]}

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        return self._changed(config, lambda part, own: part.moved(own, for_part(spec, part.name)))

    def for_dispatcher(self, config: Config) -> Config:
        def made(part: Any, own: Config) -> Config:
            given = part.credentials(own) if part.name != self._home(config) else None
            return {**part.for_dispatcher(own), **({"credentials": given} if given else {})}

        return self._changed(config, made)

    def credentials(self, config: Config) -> dict[str, str] | None:
        return None

    def _home(self, config: Config) -> str:
        """Return the cloud of the dispatcher."""
        return config.get(DISPATCHER) or next(iter(self._parts))

    def _lacking(self, config: Config, name: str, own: Config) -> NeedsPerson | None:
        """Return what the dispatcher lacks to call cloud `name`, if anything."""
        home = self._home(config)
        if name == home or self._parts[home].traits.machines is Machines.HERE or own.get("credentials") or (
                self._parts[name].credentials(own) != {}):
            return None
        return NeedsPerson(f"the dispatcher on {home} has no credentials for {name}",
                           hint=f"name them as `dispatcher_credentials` in section `{name}` of the fleet file "
                                f"(docs/clouds/{name}.md)")

    def narrowed(self, config: Config, need: Need) -> Config:
        return self._changed(config, lambda part, own: part.narrowed(own, need))

    def everywhere(self, provider: Provider, config: Config) -> Config:
        assert isinstance(provider, SeveralClouds)
        return self._changed(config, lambda part, own: part.everywhere(provider.clouds[part.name], own))

    def _changed(self, config: Config, change: Callable[[Any, Config], Config]) -> Config:
        return {**config, CLOUDS: [cloud if LEFT_OUT in cloud else {"plugin": cloud["plugin"], "config": change(
            self._parts[cloud["plugin"]], cloud["config"])} for cloud in config.get(CLOUDS, ())]}

    # ---- regions: those of the parts, joined

    def settle(self, provider: Provider, config: Config, spec: FleetSpec, hosts: int,
               region: str) -> tuple[Config, tuple[Any, ...]]:
        """Let each part choose its region as if all hosts were there. One that cannot be used is left out, with the
        reason as its row; its error is raised where the fleet cannot do without it."""
        assert isinstance(provider, SeveralClouds)
        clouds = config.get(CLOUDS, ())
        given = region.split(plugins.JOINED) if region else [""] * len(clouds)
        rows: list[RegionRow] = []
        settled: list[Config] = []
        failed: dict[str, SpotfleetError] = {}
        for cloud, accepted in zip(clouds, given, strict=True):
            name, own = cloud["plugin"], cloud["config"]
            try:
                own, some = self._settled(provider, config, name, own, spec, hosts, accepted)
                rows.extend(some)
                settled.append({"plugin": name, "config": own})
            except (NeedsPerson, NoCapacity) as error:
                failed[name] = error
                settled.append({"plugin": name, "config": own, LEFT_OUT: str(error)})
        needed = {need.provider for need in spec.any_of}
        for name, error in failed.items():
            if name == self._home(config) or not needed & {"", *self._parts} - failed.keys():
                raise error
            rows.append(RegionRow(name, 0, 0, 0, f"left out: {error}" + (f" ({error.hint})" if error.hint else "")))
        return {**config, CLOUDS: settled}, tuple(rows)

    def _settled(self, provider: SeveralClouds, config: Config, name: str, own: Config, spec: FleetSpec, hosts: int,
                 accepted: str) -> tuple[Config, tuple[RegionRow, ...]]:
        if accepted == NOWHERE:
            raise NoCapacity(f"{name} is not in the accepted plan")
        if not accepted:
            if lacking := self._lacking(config, name, own):
                raise lacking
            provider.clouds[name].check()
        part = self._parts[name]
        if not part.traits.settles_region:
            return own, ()
        return part.settle(provider.clouds[name], own, for_part(spec, name), hosts, accepted)

    def region(self, config: Config) -> str:
        found = [NOWHERE if LEFT_OUT in cloud else self._parts[cloud["plugin"]].region(cloud["config"])
                 for cloud in config.get(CLOUDS, ())]
        return plugins.JOINED.join(found) if any(found) else ""

    # ---- accounts and machines

    def account_key(self, config: Config) -> tuple[tuple[str, str], ...]:
        return tuple((name, repr(self._parts[name].account_key(own))) for name, own in self.parts(config))

    def account_config(self, key: object, fleets: object) -> None:
        return None

    def may_have_credentials(self, environ: Mapping[str, str]) -> bool:
        return all(part.may_have_credentials(environ) for part in self._parts.values())

    def notices(self, metadata_url: str) -> None:
        return None  # a host knows its own cloud

    def refuse_oversize(self, config: Config, request: LaunchRequest) -> None:
        for name, own in self.parts(config):
            self._parts[name].refuse_oversize(own, request)


class SeveralClouds:
    """Provider of several clouds: Provider, and the further abilities that its parts have."""

    def __init__(self, clouds: Mapping[str, Provider], lacking: Sequence[NeedsPerson] = ()) -> None:
        """`lacking`: what its dispatcher would lack to call these clouds."""
        self.name = plugins.JOINED.join(clouds)
        self.clouds, self._lacking = dict(clouds), tuple(lacking)

    def check(self) -> None:
        """Raise an error only if no cloud can be used: `up` leaves out the others."""
        troubles: list[SpotfleetError] = []
        for cloud in self.clouds.values():
            try:
                cloud.check()
            except SpotfleetError as error:
                troubles.append(error)
        if len(troubles) == len(self.clouds):
            raise troubles[0]

    def billing(self) -> BillingRules:
        rules = {name: cloud.billing() for name, cloud in self.clouds.items()}
        return replace(next(iter(rules.values())), of_clouds={
            name: (rule.minimum_s, rule.free_if_taken_within_s) for name, rule in rules.items()})

    # ---- what is sold

    def offers(self, need: Need) -> list[Offer]:
        """List the offers of all clouds that the need allows. Raises an error only if none has an offer."""
        found: list[Offer] = []
        troubles: list[SpotfleetError] = []
        for name, cloud in self.clouds.items():
            if need.provider in ("", name):
                try:
                    found += cloud.offers(need)
                except SpotfleetError as error:
                    troubles.append(error)
        if troubles and not found:
            raise next((e for e in troubles if isinstance(e, NeedsPerson)), troubles[0])
        return sorted(found, key=lambda o: (o.price_micros_h, o.pool))

    def unknown(self, needs: Sequence[Need]) -> str:
        """Name what a cloud does not know; a need for any cloud is unknown where none knows it."""
        problems = []
        for need in needs:
            asked = [c for n, c in self.clouds.items() if need.provider in ("", n)]
            words = [c.unknown([need]) if isinstance(c, OfferValidation) else "" for c in asked]
            problems += words if all(words) else []
        return "; ".join(dict.fromkeys(problems))

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        return [point for name, cloud in self.clouds.items()
                if (own := [p for p in pools if p.partition("/")[0] == name]) for point in cloud.prices(own, since)]

    def rates(self, region: str) -> Rates:
        found = (cloud.rates(region) for cloud in self.clouds.values() if isinstance(cloud, RateSource))
        return next((rates for rates in found if rates != Rates()), Rates())

    def cloud_time(self) -> float:
        """Return the time of the first cloud that answers with one."""
        trouble = SpotfleetError(f"{self.name}: no cloud has a clock")
        for cloud in self.clouds.values():
            if isinstance(cloud, CloudClock):
                try:
                    return cloud.cloud_time()
                except SpotfleetError as error:
                    trouble = error
        raise trouble

    # ---- hosts

    def launch(self, request: LaunchRequest) -> None:
        self._of(request.offer).launch(self._own(request))

    def launch_together(self, requests: Sequence[LaunchRequest]) -> None:
        cloud = self._of(requests[0].offer)
        if not isinstance(cloud, GroupLaunch):
            raise NoCapacity(f"{cloud.name} launches no hosts together", hint="`all_or_nothing: false`")
        cloud.launch_together([self._own(request) for request in requests])

    def _of(self, offer: Offer) -> Provider:
        if offer.provider not in self.clouds:
            raise UsageError(f"the fleet is not on {offer.provider}", hint=f"it is on {', '.join(self.clouds)}")
        return self.clouds[offer.provider]

    @staticmethod
    def _own(request: LaunchRequest) -> LaunchRequest:
        return replace(request, alternatives=tuple(
            o for o in request.alternatives if o.provider == request.offer.provider))

    def hosts(self, fleet: str) -> list[CloudHost]:
        return [line for cloud in self.clouds.values() for line in cloud.hosts(fleet)]

    def terminate(self, request_id: str) -> None:
        """End it wherever it is. A cloud that does not answer keeps no other one from being asked; then its error is
        raised, as the host may be there."""
        troubles: list[SpotfleetError] = []
        for cloud in self.clouds.values():
            try:
                cloud.terminate(request_id)
            except SpotfleetError as error:
                troubles.append(error)
        if troubles:
            raise troubles[0]

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        self._first(lambda cloud: cloud.tag(request_id, tags))

    def boot_files(self, request_id: str) -> dict[str, str]:
        return self._first(lambda cloud: cloud.boot_files(request_id))

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        self._first(lambda cloud: cloud.interrupt(request_id, notice_s))

    def _first(self, call: Callable[[Provider], Any]) -> Any:
        """Return the answer of the cloud that has the host; the last error where none has it."""
        trouble: SpotfleetError | None = None
        for cloud in self.clouds.values():
            try:
                return call(cloud)
            except UsageError as error:
                trouble = error
        assert trouble is not None
        raise trouble

    # ---- resources: a kind is "CLOUD KIND"

    def _managed(self) -> dict[str, ManagedResources]:
        return {name: cloud for name, cloud in self.clouds.items() if isinstance(cloud, ManagedResources)}

    def prepare(self, fleet: str, tags: Mapping[str, str], progress: Callable[[str], None]) -> None:
        for cloud in self._managed().values():
            cloud.prepare(fleet, tags, progress)

    def allow_ssh_from_here(self, fleet: str, progress: Callable[[str], None]) -> None:
        for cloud in self._managed().values():
            cloud.allow_ssh_from_here(fleet, progress)

    def list_resources(self, fleet: str, everywhere: bool = False) -> list[Resource]:
        return [replace(one, kind=f"{name} {one.kind}") for name, cloud in self._managed().items()
                for one in cloud.list_resources(fleet, everywhere)]

    def regions(self, everywhere: bool = False) -> list[str]:
        return [region for cloud in self._managed().values() for region in cloud.regions(everywhere)]

    def in_regions(self, regions: Sequence[str]) -> SeveralClouds:
        """Return the same accounts, each limited to those of its regions that are among these."""
        limited: dict[str, Any] = dict(self.clouds)
        for name, cloud in self._managed().items():
            if own := [r for r in cloud.regions(everywhere=True) if r in regions]:
                limited[name] = cloud.in_regions(own)
            else:
                del limited[name]
        return SeveralClouds(limited)

    def resource_kinds(self) -> list[str]:
        return [f"{name} {kind}" for name, cloud in self._managed().items() for kind in cloud.resource_kinds()]

    def delete_resource(self, resource: Resource) -> None:
        name, _, kind = resource.kind.partition(" ")
        self._managed()[name].delete_resource(replace(resource, kind=kind))

    def findings(self, spec: FleetSpec | None) -> Iterable[Finding]:
        for name, cloud in self._managed().items():
            try:
                for found in cloud.findings(for_part(spec, name) if spec else None):
                    yield replace(found, what=f"{name}: {found.what}")
            except SpotfleetError as error:
                yield Finding(f"{name}: {error}", "blocker", error.hint, "provider")
        for lacking in self._lacking:
            yield Finding(str(lacking), "blocker", lacking.hint, "dispatcher")

    # ---- events

    def _events(self) -> list[InterruptionEvents]:
        return [cloud for cloud in self.clouds.values() if isinstance(cloud, InterruptionEvents) and cloud.has_events()]

    def has_events(self) -> bool:
        return bool(self._events())

    def poll_events(self, fleet: str, wait_s: float) -> list[CloudEvent]:
        sources = self._events()
        return [event for source in sources for event in source.poll_events(fleet, wait_s / len(sources))]

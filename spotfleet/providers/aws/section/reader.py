"""Rules of section `aws` that involve several keys, and of other keys of the file on AWS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfleet.model import Need
from spotfleet.plugins import FileFacts, Note
from spotfleet.providers.aws.section import values
from spotfleet.providers.aws.section.schema import AwsSection
from spotfleet.providers.aws.section.spec import AwsNetwork, AwsSpec
from spotfleet.providers.aws.section.values import region_of, wrong_tags


def read(given: AwsSection, facts: FileFacts, note: Note) -> AwsSpec:
    """Convert the section to a spec. Notes every problem.

    If the section names no regions, the spec takes those of the needs.
    """
    _refuse_stop_in_a_group(facts, note)
    _refuse_stop_without_end(facts, note)
    for name, text in wrong_tags(facts.tags):
        note(("tags", name) if name else ("tags",), text)
    spec = AwsSpec(
        regions=_regions(facts, given, note), joined=given.joined,
        networks=tuple(AwsNetwork(region, n.vpc, n.subnets, n.security_groups, n.dispatcher_security_groups)
                       for region, n in given.networks.items()),
        profile=given.profile, public_addresses=given.public_addresses, ssh_from=given.ssh_from,
        image=given.image or _image(facts, note),
        dispatcher_image=given.dispatcher_image, user=given.user, disk_gib=_disk(given, facts, note),
        dispatcher_disk_gib=given.dispatcher_disk, kms_key=given.kms_key, key_pair=given.key_pair,
        dispatcher_profile=given.dispatcher_profile, host_profile=given.host_profile, event_queue=given.event_queue,
        interruption_queue=given.interruption_queue,
        dispatcher_credentials=given.dispatcher_credentials,
        permissions_boundary=given.permissions_boundary, capacity_reservations=given.capacity_reservation,
    )
    _check(spec, note)
    return spec


def _image(facts: FileFacts, note: Note) -> str:
    return _checked(values.image, facts.image, "image_id", note) if facts.image else ""


def _disk(given: AwsSection, facts: FileFacts, note: Note) -> int:
    """Return the size of a host's disk: that of the section, or else of `resources`."""
    if not facts.disk_gib or "disk" in given.model_fields_set:
        return given.disk
    return _checked(values.disk, facts.disk_gib, "disk_size", note)


def _checked(check: Callable[[Any], Any], value: Any, key: str, note: Note) -> Any:
    try:
        return check(value)
    except ValueError as error:
        note(("resources", key), str(error))
        return value


def _refuse_stop_in_a_group(facts: FileFacts, note: Note) -> None:
    if facts.placement == "cluster" and facts.interruption_behavior == "stop":
        note(("interruption_behavior",),
             "EC2 launches no spot instance that it would stop into a placement group; write `terminate`, or "
             "`placement: zone`")


def _refuse_stop_without_end(facts: FileFacts, note: Note) -> None:
    if facts.interruption_behavior == "stop" and not facts.max_lifetime_s:
        note(("interruption_behavior",),
             "a host that nobody ends powers itself off, which only stops it, and its spot request would stay open for "
             "ever: write `max_lifetime`, after which the request ends, or `terminate`")


def _regions(facts: FileFacts, given: AwsSection, note: Note) -> tuple[str, ...]:
    """Return the regions of the section, or else those of the needs.

    Notes a zone outside its region, and a place outside the section's regions.
    """
    for place in facts.places:
        home = region_of(place.zone)
        if place.region and home and home != place.region:
            note((*place.at, "zone"), f"{place.zone} is a zone of {home}, not of {place.region}")
        elif given.regions and (wanted := place.region or home) and wanted not in given.regions:
            note((*place.at, "region" if place.region else "zone"),
                 f"is in {wanted}, which is none of aws.regions: {', '.join(given.regions)}")
    return given.regions or regions_of(facts.needs)


def regions_of(needs: tuple[Need, ...]) -> tuple[str, ...]:
    """Return the regions that the needs name; () if one of them names none."""
    named = [need.region or region_of(need.zone) for need in needs]
    return tuple(dict.fromkeys(named)) if all(named) else ()


def _check(spec: AwsSpec, note: Note) -> None:
    """Note problems that involve several keys of the section."""
    known = {n.region: n for n in spec.networks}
    for region in known.keys() - set(spec.regions) if spec.regions else ():
        note(("aws", "networks", region), f"is of a region where the fleet may not be; aws.regions has "
                                          f"{', '.join(spec.regions)}")
    bare = [r for r in spec.regions if r not in known or not (known[r].vpc or known[r].subnets)]
    if spec.joined and (bare or len(spec.regions) < 2):
        note(("aws", "joined"), "is your promise that the networks of all regions reach each other; name each "
                                "under aws.networks"
                     + (f": {', '.join(bare)} has none" if bare else ", of two regions at least"))
    named = bool(spec.regions) and all(r in known and known[r].security_groups for r in spec.regions)
    if not spec.public_addresses and not spec.ssh_from and not named:
        note(("aws", "ssh_from"), "is missing: without public addresses you come by a way of your own, and "
                                  "`up` cannot find out from which network")
    for key in ("image", "dispatcher_image"):
        if getattr(spec, key).startswith("ami-") and len(spec.regions) > 1:
            note(("aws", key), f"an image with an id is of one region, and the fleet may be in "
                               f"{', '.join(spec.regions)}; name one region, or an SSM parameter")
    if spec.kms_key.startswith("arn:") and any(r != spec.kms_key.split(":")[3] for r in spec.regions):
        note(("aws", "kms_key"), f"is a key of {spec.kms_key.split(':')[3]}, and the fleet may be in "
                                 f"{', '.join(spec.regions)}; name one region, or alias/NAME")

"""Parser of section `aws`, and of `placement` and `all_or_nothing`, which only provider aws has."""

from __future__ import annotations

from spotfleet.config.aws_values import region_of, wrong_tags
from spotfleet.config.document import Document, Place
from spotfleet.config.sections import AwsSection, FileSection
from spotfleet.model import AwsNetwork, AwsSpec, Need

ONLY_AWS = "is for provider aws, but the fleet's is '{}'; write `provider: aws`, or remove {}"


def aws_spec(document: Document, file: FileSection, provider: str, needs: tuple[Need, ...]) -> AwsSpec | None:
    """Convert the section to a spec; None for another provider. Notes every problem.

    If the section names no regions, the spec takes those of the needs.
    """
    if provider != "aws":
        _refuse_elsewhere(document, file, provider)
        return None
    given = file.aws or AwsSection()
    _refuse_stop_in_a_group(document, file)
    _refuse_stop_without_end(document, file)
    for name, text in wrong_tags(file.tags):
        document.add(("tags", name) if name else ("tags",), text)
    spec = AwsSpec(
        regions=_regions(document, file, given, needs), joined=given.joined,
        networks=tuple(AwsNetwork(region, n.vpc, n.subnets, n.security_groups) for region, n in given.networks.items()),
        profile=given.profile, public_addresses=given.public_addresses, ssh_from=given.ssh_from, image=given.image,
        dispatcher_image=given.dispatcher_image, user=given.user, disk_gib=given.disk,
        dispatcher_disk_gib=given.dispatcher_disk, kms_key=given.kms_key, key_pair=given.key_pair,
        dispatcher_profile=given.dispatcher_profile, host_profile=given.host_profile, event_queue=given.event_queue,
    )
    _check(document, spec)
    return spec


def _refuse_elsewhere(document: Document, file: FileSection, provider: str) -> None:
    if file.aws is not None:
        document.add(("aws",), ONLY_AWS.format(provider, "the section"))
    for key, set_ in (("placement", file.placement != "spread"), ("all_or_nothing", file.all_or_nothing)):
        if set_:
            document.add((key,), ONLY_AWS.format(provider, "this"))


def _refuse_stop_in_a_group(document: Document, file: FileSection) -> None:
    if file.placement == "cluster" and file.interruption_behavior == "stop":
        document.add(("interruption_behavior",),
                     "EC2 launches no spot instance that it would stop into a placement group; write `terminate`, or "
                     "`placement: zone`")


def _refuse_stop_without_end(document: Document, file: FileSection) -> None:
    if file.interruption_behavior == "stop" and not file.max_lifetime:
        document.add(("interruption_behavior",),
                     "a host that nobody ends powers itself off, which only stops it, and its spot request would stay "
                     "open for ever: write `max_lifetime`, after which the request ends, or `terminate`")


def _regions(document: Document, file: FileSection, given: AwsSection, needs: tuple[Need, ...]) -> tuple[str, ...]:
    """Return the regions of the section, or else those of the needs.

    Notes a zone outside its region, and a place outside the section's regions.
    """
    alternatives = file.resources.any_of or []
    places: list[tuple[Place, str, str]] = [
        (place, section.infra[1] if section.infra else section.region or "",
         section.infra[2] if section.infra else section.zone or "")
        for place, section in [(("resources",), file.resources), (("dispatcher",), file.dispatcher),
                               *((("resources", "any_of", i), a) for i, a in enumerate(alternatives))]]
    for place, region, zone in places:
        home = region_of(zone)
        if region and home and home != region:
            document.add((*place, "zone"), f"{zone} is a zone of {home}, not of {region}")
        elif given.regions and (wanted := region or home) and wanted not in given.regions:
            document.add((*place, "region" if region else "zone"),
                         f"is in {wanted}, which is none of aws.regions: {', '.join(given.regions)}")
    named = [need.region or region_of(need.zone) for need in needs]
    return given.regions or (tuple(dict.fromkeys(named)) if all(named) else ())


def _check(document: Document, spec: AwsSpec) -> None:
    """Note problems that involve several keys of the section."""
    known = {n.region: n for n in spec.networks}
    for region in known.keys() - set(spec.regions) if spec.regions else ():
        document.add(("aws", "networks", region), f"is of a region where the fleet may not be; aws.regions has "
                                                  f"{', '.join(spec.regions)}")
    bare = [r for r in spec.regions if r not in known or not (known[r].vpc or known[r].subnets)]
    if spec.joined and (bare or len(spec.regions) < 2):
        document.add(("aws", "joined"), "is your promise that the networks of all regions reach each other; name each "
                                        "under aws.networks"
                     + (f": {', '.join(bare)} has none" if bare else ", of two regions at least"))
    named = bool(spec.regions) and all(r in known and known[r].security_groups for r in spec.regions)
    if not spec.public_addresses and not spec.ssh_from and not named:
        document.add(("aws", "ssh_from"), "is missing: without public addresses you come by a way of your own, and "
                                          "`up` cannot find out from which network")
    for key in ("image", "dispatcher_image"):
        if getattr(spec, key).startswith("ami-") and len(spec.regions) > 1:
            document.add(("aws", key), f"an image with an id is of one region, and the fleet may be in "
                                       f"{', '.join(spec.regions)}; name one region, or an SSM parameter")
    if spec.kms_key.startswith("arn:") and any(r != spec.kms_key.split(":")[3] for r in spec.regions):
        document.add(("aws", "kms_key"), f"is a key of {spec.kms_key.split(':')[3]}, and the fleet may be in "
                                         f"{', '.join(spec.regions)}; name one region, or alias/NAME")

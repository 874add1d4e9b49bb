"""Section `gcp` of the fleet file: its keys, their values, and rules of several keys."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from spotfleet.config.sections import Flag, Section, Text, User
from spotfleet.plugins import FileFacts, Note
from spotfleet.providers.gcp.mapping import names
from spotfleet.providers.gcp.spec import GcpSpec

PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
REGION = re.compile(r"[a-z]+-[a-z]+\d+")
NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
NETWORK = re.compile(rf"(projects/{PROJECT.pattern}/global/networks/)?{NAME.pattern}")
SUBNET = re.compile(rf"(projects/{PROJECT.pattern}/regions/{REGION.pattern}/subnetworks/)?{NAME.pattern}")
IMAGE = re.compile(rf"spotfleet|projects/{PROJECT.pattern}/global/images/(family/)?[a-z][a-z0-9-]*")
IMAGE_EXPECTED = "spotfleet, projects/PROJECT/global/images/NAME or .../images/family/FAMILY"
ACCOUNT = re.compile(r"[^@\s]+@[a-z0-9.-]+\.gserviceaccount\.com|default")
KEY = re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+")
DISK_TYPES = ("pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced")  # those that a machine boots from
DISK_GIB = (10, 65_536)


def _wrong(expected: str, value: Any, more: str = "") -> ValueError:
    return ValueError(f"expected {expected}, got {value!r}{more}")


def _matching(pattern: re.Pattern[str], expected: str) -> BeforeValidator:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _wrong(expected, value)
        return value

    return BeforeValidator(check)


def _regions(value: Any) -> tuple[str, ...]:
    """Check a list of regions, or a single one."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise _wrong("a list of regions such as [us-central1, europe-west4]", value)
    for one in found:
        if not isinstance(one, str) or not REGION.fullmatch(one):
            home = names.region_of(one) if isinstance(one, str) else ""
            raise _wrong("a region such as us-central1", one,
                         f"; that is a zone of {home}; zones stand under `resources`" if home else "")
    return tuple(dict.fromkeys(found))


def _subnetworks(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and REGION.fullmatch(k) and isinstance(v, str)
                                              and SUBNET.fullmatch(v) for k, v in value.items()):
        raise _wrong("REGION: NAME pairs such as {us-central1: training}", value)
    return value


def _tags(value: Any) -> tuple[str, ...]:
    """Check a list of network tags, or a single one."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) and NAME.fullmatch(one) for one in found):
        raise _wrong("a list of network tags such as [training]", value)
    return tuple(found)


def _networks_from(value: Any) -> tuple[str, ...]:
    """Check a list of CIDRs, or a single one; an address is a network of its own."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise _wrong("a list of networks such as [203.0.113.0/24]", value)
    return tuple(map(_cidr, found))


def _cidr(value: Any) -> str:
    try:
        found = ipaddress.ip_network(value if isinstance(value, str) else "")
    except ValueError:
        raise _wrong("an address or a network such as 203.0.113.7 or 203.0.113.0/24", value) from None
    if found.prefixlen == 0:
        raise ValueError(f"{value} is the whole world; name the networks that you come from, or leave it out")
    return str(found)


def _disk(value: Any) -> int:
    low, high = DISK_GIB
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(f"a number of GiB from {low} to {high}", value)
    return value


def _disk_type(value: Any) -> str:
    if value not in DISK_TYPES:
        raise _wrong(f"one of {', '.join(DISK_TYPES)}", value)
    return value


def _ssds(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 24:
        raise _wrong("a number of local SSDs from 0 to 24", value)
    return value


Image = Annotated[str, _matching(IMAGE, IMAGE_EXPECTED)]
ServiceAccount = Annotated[str, _matching(ACCOUNT, "NAME@PROJECT.iam.gserviceaccount.com, or default")]
Disk = Annotated[int, BeforeValidator(_disk)]


class GcpSection(Section):
    project: Annotated[str, _matching(PROJECT, "the id of a project such as my-project-123")] = ""
    regions: Annotated[tuple[str, ...], BeforeValidator(_regions)] = ()
    network: Annotated[str, _matching(NETWORK, "the name of a network, or projects/HOST/global/networks/NAME")] = ""
    subnetworks: Annotated[dict[str, str], BeforeValidator(_subnetworks)] = Field(default_factory=dict)
    network_tags: Annotated[tuple[str, ...], BeforeValidator(_tags)] = ()
    dispatcher_network_tags: Annotated[tuple[str, ...], BeforeValidator(_tags)] = ()
    public_addresses: Flag = True
    ssh_from: Annotated[tuple[str, ...], BeforeValidator(_networks_from)] = ()
    image: Image = ""
    dispatcher_image: Image = ""
    user: User = "ubuntu"
    disk: Disk = 100
    dispatcher_disk: Disk = 30
    disk_type: Annotated[str, BeforeValidator(_disk_type)] = ""
    disk_key: Annotated[str, _matching(KEY, "a key such as projects/P/locations/L/keyRings/R/cryptoKeys/K")] = ""
    local_ssds: Annotated[int, BeforeValidator(_ssds)] = 0
    service_account: ServiceAccount = ""
    dispatcher_service_account: ServiceAccount = ""
    dispatcher_credentials: Text = ""


def read(given: GcpSection, facts: FileFacts, note: Note) -> GcpSpec:
    """Convert the section to a spec. Notes every problem.

    If the section names no regions, the spec takes those of the needs.
    """
    for place in facts.places:
        home = names.region_of(place.zone)
        if place.region and home and home != place.region:
            note((*place.at, "zone"), f"{place.zone} is a zone of {home}, not of {place.region}")
        elif given.regions and (wanted := place.region or home) and wanted not in given.regions:
            note((*place.at, "region" if place.region else "zone"),
                 f"is in {wanted}, which is none of gcp.regions: {', '.join(given.regions)}")
    for key, value in facts.tags.items():
        if key.startswith(names.FLEET):
            note(("tags", key), f"begins with {names.FLEET}, as our own labels do; choose another name")
        elif names.labels({key: value}) == {}:
            note(("tags", key), "Google Cloud takes labels of small letters, digits, - and _, a letter first, with up "
                                "to 63 characters")
    if facts.interruption_behavior == "stop" and given.local_ssds:
        note(("gcp", "local_ssds"), "a preempted machine loses its local SSDs, and it cannot be stopped with any; "
                                    "write `interruption_behavior: terminate`")
    if facts.placement == "cluster":
        note(("placement",), "a fleet on Google Cloud has no compact placement yet; write `zone`")
    if not given.public_addresses and not given.ssh_from and not given.network_tags:
        note(("gcp", "ssh_from"), "is missing: without public addresses you come by a way of your own, and `up` cannot "
                                  "find out from which network")
    if given.network.startswith("projects/") and not given.subnetworks:
        note(("gcp", "subnetworks"), "is missing: a fleet in a shared VPC names a subnet for each of its regions")
    named = [need.region or names.region_of(need.zone) for need in facts.needs]
    regions = given.regions or (tuple(dict.fromkeys(named)) if all(named) else ())
    return GcpSpec(
        given.project, regions, given.network, given.subnetworks, given.public_addresses, given.ssh_from,
        given.image or _image_of_resources(facts, note), given.dispatcher_image, given.user,
        _disk_of_host(given, facts, note), given.dispatcher_disk, given.disk_type, given.local_ssds,
        given.service_account, given.dispatcher_service_account, given.network_tags, given.dispatcher_network_tags,
        given.disk_key, given.dispatcher_credentials)


def _image_of_resources(facts: FileFacts, note: Note) -> str:
    if facts.image and not IMAGE.fullmatch(facts.image):
        note(("resources", "image_id"), str(_wrong(IMAGE_EXPECTED, facts.image)))
    return facts.image


def _disk_of_host(given: GcpSection, facts: FileFacts, note: Note) -> int:
    """Return the size of a host's disk: that of the section, or else of `resources`."""
    if not facts.disk_gib or "disk" in given.model_fields_set:
        return given.disk
    try:
        return _disk(facts.disk_gib)
    except ValueError as error:
        note(("resources", "disk_size"), str(error))
        return given.disk

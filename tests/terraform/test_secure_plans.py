"""Rules for whatever the modules plan, in all runs of their tests: who comes in, what is encrypted, whose it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.terraform.schema.run import TestReport
from tests.terraform.test_modules import MODULES

WORLD = {"0.0.0.0/0", "::/0", "*", "Internet", "Any"}
FLEETS_OWN = "spotfleet"  # tag by which `spotfleet down` lists what it removes
CONTRACT = {
    "version", "module", "provider", "name", "account", "region", "network", "subnets", "public_addresses", "firewall",
    "identities", "checkpoints", "queue", "image", "dispatcher_image", "disk_gib", "dispatcher_disk_gib", "disk_key",
    "launch_template", "dispatcher", "worker_group", "tags"}

Resource = Mapping[str, Any]


def resources(report: TestReport) -> Iterator[tuple[str, str, Resource]]:
    """Yield run and type, and planned values, of each resource of each run."""
    for run in report.runs():
        for address, planned in report.planned(run).items():
            yield f"{run}: {address}", address.partition(".")[0], planned


def sources(kind: str, planned: Resource) -> list[str] | None:
    """Return where an inbound rule lets packets come from; None for what lets nothing in."""
    match kind:
        case "google_compute_firewall" if planned["direction"] == "INGRESS":
            return [*(planned["source_ranges"] or ()), *(planned["source_tags"] or ())]
        case "aws_vpc_security_group_ingress_rule":
            return [planned[k] or "" for k in ("cidr_ipv4", "cidr_ipv6")]
        case "aws_security_group":
            return [c for rule in planned.get("ingress") or () for c in rule["cidr_blocks"] or ()]
        case "azurerm_network_security_rule" if (planned["direction"], planned["access"]) == ("Inbound", "Allow"):
            return [planned["source_address_prefix"] or "", *(planned["source_address_prefixes"] or ())]
    return None


def unencrypted(kind: str, planned: Resource) -> list[str]:
    """Return the parts of a machine or disk that are not encrypted by its own settings. Google's all are."""
    match kind:
        case "aws_launch_template":
            disks = [ebs for d in planned["block_device_mappings"] for ebs in d["ebs"]]
            return [str(d) for d in disks if str(d["encrypted"]).lower() != "true"] or ([] if disks else ["no disk"])
        case "aws_instance":
            return [str(d) for d in planned["root_block_device"] if not d["encrypted"]]
        case "aws_ebs_volume":
            return [] if planned["encrypted"] else ["volume"]
        case "azurerm_linux_virtual_machine" | "azurerm_linux_virtual_machine_scale_set":
            return [] if planned["encryption_at_host_enabled"] else ["machine"]
    return []


@pytest.mark.parametrize("name", MODULES)
def test_no_rule_lets_in_the_world(module_tests: Callable[[str], TestReport], name: str):
    rules = {where: found for where, kind, planned in resources(module_tests(name))
             if (found := sources(kind, planned)) is not None}
    assert rules and {where: found for where, found in rules.items() if WORLD & set(found)} == {}


@pytest.mark.parametrize("name", MODULES)
def test_every_disk_is_encrypted(module_tests: Callable[[str], TestReport], name: str):
    planned = list(resources(module_tests(name)))
    assert planned and {where: parts for where, kind, values in planned if (parts := unencrypted(kind, values))} == {}


@pytest.mark.parametrize("name", MODULES)
def test_all_is_tagged_as_the_bases_and_nothing_as_a_fleets(module_tests: Callable[[str], TestReport], name: str):
    tagged = {where: tags for where, _, planned in resources(module_tests(name)) for key in ("tags", "labels")
              if isinstance(tags := planned.get(key), dict)}
    assert tagged
    for where, tags in tagged.items():
        assert FLEETS_OWN not in tags and tags["spotfleet-managed-by"] == "terraform", where
        assert tags["spotfleet-base"] == "research", where


@pytest.mark.parametrize("name", MODULES)
def test_the_output_has_every_key_of_the_contract_in_every_run(module_tests: Callable[[str], TestReport], name: str):
    report = module_tests(name)
    assert report.runs()
    for run in report.runs():
        assert report.output_keys(run, "spotfleet") == CONTRACT, run

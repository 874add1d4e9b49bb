"""The example of a small cloud, examples/lambda-cloud, beyond the contract: against a fake of its API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import CloudState, FleetSpec, Need, Role
from spotfleet.plugins import FileFacts
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.ssh.keys import derived_host_key, pinned
from tests.support.contract.lambda_world import LambdaWorld
from tests.support.contract.provider_worlds import request

A10 = Need(accelerator="A10", use_spot=False)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LambdaWorld]:
    made = LambdaWorld(tmp_path, monkeypatch)
    yield made
    made.close()


def offer(world: LambdaWorld) -> Any:
    return world.provider().offers(A10)[0]


def config(world: LambdaWorld, **section: Any) -> dict[str, Any]:
    return {"url": world.cloud.url, "api_key": "a-key-of-the-fake", "section": {"ssh_key": "laptop", **section}}


def test_of_several_instances_of_one_host_the_first_stays_and_the_next_call_ends_the_others(world):
    world.provider().launch(request(offer(world)))
    first = world.cloud.instances[0]
    world.cloud._launch({"region_name": "us-east-1", "instance_type_name": "gpu_1x_a10", "ssh_key_names": ["laptop"],
                         "tags": first.body["tags"]})  # another process, at the same moment
    assert [h.provider_id for h in world.provider().hosts("f")] == [first.body["id"]]
    world.provider().launch(request(offer(world)))
    assert world.cloud.living() == [first]
    (line,) = world.provider().hosts("f")
    assert line.provider_id == first.body["id"] and len(line.runs) == 2  # the other one was billed too


def test_an_instance_that_the_cloud_took_was_taken_and_is_not_launched_again(world):
    world.provider().launch(request(offer(world)))
    world.let_pass(5.0)
    world.cloud.instances[0].ended_at, world.cloud.instances[0].end = world.clock(), "preempted"
    (line,) = world.provider().hosts("f")
    assert line.state is CloudState.TERMINATED and (line.runs[0].taken, line.why) == (True, "preempted")
    world.provider().launch(request(offer(world)))
    assert world.cloud.living() == []


def test_the_user_data_makes_the_host_with_its_key_and_the_plugin(world):
    provider = world.module.LAMBDA.open({**config(world), "secret": "s", "public_key": "ssh-ed25519 AAAA laptop"})
    provider.launch(LaunchRequest("f-d-0", "f", Role.DISPATCHER, offer(world), Boot("spotfleet.dispatcher")))
    made = yaml.safe_load(world.cloud.instances[0].user_data)
    host_key = derived_host_key("s", "f-d-0").public
    settings = next(f["content"] for f in made["write_files"] if f["path"].endswith("/f-d-0/settings.sh"))
    assert made["ssh_keys"]["ed25519_public"] == host_key and "spotfleet_lambda" in settings
    (line,) = provider.hosts("f")
    assert (line.role, line.port, line.address, line.ssh.address) == (Role.DISPATCHER, 7443, "10.0.2.1", "198.51.100.1")
    assert line.ssh.host_keys == (pinned(host_key),)


def test_errors_of_the_api_become_ours(world):
    with pytest.raises(NeedsPerson) as refused:
        world.module.LAMBDA.open({**config(world), "api_key": "another"}).check()
    assert "LAMBDA_API_KEY" in refused.value.hint
    with pytest.raises(NeedsPerson, match="object-does-not-exist") as missing:
        world.module.LAMBDA.open(config(world, ssh_key="none")).launch(request(offer(world)))
    assert "lambda.ssh_key" in missing.value.hint
    again = world.module._refusal("/instances", 429, b"slow down")
    assert type(again) is SpotfleetError and "429" in str(again)
    assert world.module._refusal("/x", 400, b'{"error": {"code": "global/quota-exceeded"}}').scope == "account"
    for ask in ("tag", "boot_files"):
        world.provider().launch(request(offer(world)))
        with pytest.raises(UsageError, match="lambda"):
            getattr(world.provider(), ask)(*(["f-1", {"a": "b"}] if ask == "tag" else ["f-1"]))


def test_a_new_fleet_gets_the_region_where_hosts_and_dispatcher_have_room(world):
    plugin, spec = world.module.LAMBDA, FleetSpec("f", "lambda", (A10,), dispatcher=Need(use_spot=False))
    world.cloud.full.add(("gpu_1x_a10", "us-east-1"))
    settled, rows = plugin.settle(plugin.open(config(world)), config(world), spec, 2, "")
    assert plugin.region(settled) == "us-west-1" and [row.region for row in rows] == ["us-west-1", "us-east-1"]
    assert rows[0].total_micros_h == 3 * 750_000 and rows[1].why
    world.cloud.full.add(("gpu_1x_a10", "us-west-1"))
    with pytest.raises(NoCapacity, match="no region"):
        plugin.settle(plugin.open(config(world)), config(world), spec, 2, "")


def test_the_section_refuses_what_this_cloud_has_not(world):
    plugin, notes = world.module.LAMBDA, []
    facts = FileFacts(needs=(Need(),), interruption_behavior="stop", tags={"Team": "a", "team": "x" * 129, "ok": "a"})
    assert plugin.read_section(None, facts, lambda at, text: notes.append((at, text.partition(" ")[0]))) == {}
    assert [at for at, _ in notes] == [("resources",), ("interruption_behavior",), ("tags", "Team"), ("tags", "team"),
                                       ("lambda",)]
    given = plugin.section()(ssh_key="laptop")
    assert plugin.read_section(given, FileFacts(needs=(A10,)), lambda *_: pytest.fail("no problem")) == {
        "ssh_key": "laptop", "regions": []}


def test_the_dispatchers_machine_gets_the_accounts_key_and_the_laptops_record_does_not(world, monkeypatch):
    monkeypatch.setenv("LAMBDA_API_KEY", "hidden")
    plugin = world.module.LAMBDA
    spec = FleetSpec("f", "lambda", (A10,), section={"ssh_key": "laptop"})
    kept = plugin.config(spec, {"LAMBDA_API_KEY": "hidden"}, "")
    assert "hidden" not in str(kept) and plugin.for_dispatcher(kept)["api_key"] == "hidden"
    assert plugin.may_have_credentials({"LAMBDA_API_KEY": "x"}) and not plugin.may_have_credentials({})

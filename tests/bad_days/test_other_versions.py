"""An old command line against a new dispatcher, the reverse, and an agent of another version: each is told the fix."""

from __future__ import annotations

import pytest

from spotfleet.dispatcher.http.version_check import replace_host
from spotfleet.protocol import versions
from spotfleet.protocol.messages import AgentOrders, AgentReport, dump, load
from spotfleet.protocol.versions import HEADER, SpokenVersion, compare
from spotfleet.transport import certs
from tests.support.cli.cli_cloud import FakeHandler
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec

OURS = versions.own_version()
OLD, NEW = SpokenVersion(OURS.protocol - 1, "0.0.9"), SpokenVersion(OURS.protocol + 1, "9.0.0")


def test_the_words_name_both_versions_and_the_fix():
    old = compare(OLD, NEW)
    assert old and old.why == (f"this spotfleet (0.0.9, protocol {OLD.protocol}) is older than the fleet's dispatcher "
                               f"(9.0.0, protocol {NEW.protocol}), and they are not compatible")
    assert old.hint == ("`git pull` and `pip install .` in your clone of spotfleet; or end the fleet with "
                        "`spotfleet down`, which works between all versions")
    new = compare(NEW, OLD)
    assert new and "is newer than the fleet's dispatcher (0.0.9" in new.why
    assert new.hint.startswith("install spotfleet 0.0.9 to go on with this fleet; or end")
    assert compare(SpokenVersion(OURS.protocol, "0.1.0"), SpokenVersion(OURS.protocol, "0.7.0")) is None


def test_a_dispatcher_that_would_take_a_part_of_a_checkpoint_for_the_whole_is_not_spoken_to():
    assert compare(OURS, SpokenVersion(1, "0.1.0")) is not None


async def ask(stage: Stage, method: str, path: str, *, speaks: str, token: str = ADMIN) -> tuple[int, dict, str]:
    """(status, JSON, what the dispatcher speaks)"""
    headers = {"Authorization": f"Bearer {token}"} | ({HEADER: speaks} if speaks else {})
    async with stage.http.request(method, stage.url + path, headers=headers, json={} if method == "POST" else None,
                                  ssl=certs.client_context(stage.ca)) as answer:
        told = await answer.json() if answer.content_type == "application/json" else {}
        return answer.status, told, answer.headers.get(HEADER, "")


def test_the_dispatcher_refuses_callers_of_another_protocol_but_for_what_down_needs(play):
    async def scene(stage: Stage) -> None:
        for theirs in (OLD, NEW):
            found = compare(theirs, OURS)
            refused = {"error": found.why, "hint": found.hint, "kind": "NeedsPerson"}
            for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/events")):
                assert await ask(stage, method, path, speaks=str(theirs)) == (426, refused, str(OURS))
            for method, path in (("GET", "/v1/status"), ("GET", "/v1/archive"), ("GET", "/v1/archive/manifest"),
                                 ("GET", "/v1/archive/files/ledger.db"), ("POST", "/v1/down")):
                assert (await ask(stage, method, path, speaks=str(theirs)))[0] == 200
        assert (await ask(stage, "GET", "/v1/jobs", speaks=str(OURS)))[0] == 200
        assert (await ask(stage, "GET", "/v1/jobs", speaks=""))[0] == 200  # curl

    play(scene, spec(1))


def test_strangers_do_not_learn_our_version(play):
    async def scene(stage: Stage) -> None:
        assert await ask(stage, "GET", "/healthz", speaks=str(OLD), token="wrong") == (200, {"ok": True}, "")
        status, told, version = await ask(stage, "GET", "/v1/status", speaks=str(OLD), token="wrong")
        assert (status, version) == (401, "") and "spotfleet" not in told["error"]

    play(scene, spec(1))


@pytest.fixture
def other_dispatcher(up, monkeypatch):
    """The fleet's dispatcher is of a newer release, which changed its messages and kept what is frozen."""
    answer = FakeHandler._answer

    def newer(self, value: dict, status: int = 200) -> None:
        self.close_connection = True
        if "hosts" in value:
            keep = ("host", "role", "state")
            value = {"state": value["state"], "why": value["why"], "fleet": 7,
                     "hosts": [{k: h[k] for k in keep} for h in value["hosts"]]}
        answer(self, value, status)

    end_headers = FakeHandler.end_headers

    def with_version(self) -> None:
        if self.path != "/healthz":
            self.send_header(HEADER, str(NEW))
        end_headers(self)

    monkeypatch.setattr(FakeHandler, "_answer", newer)
    monkeypatch.setattr(FakeHandler, "end_headers", with_version)
    return up


def test_every_command_names_the_older_side_and_the_fix(other_dispatcher):
    found = compare(OURS, NEW)
    for command in ("status", "jobs", "events", "cost", "logs", "train hello.py", "up fleet.yaml -y", "drain x"):
        said = other_dispatcher.fails(command, code=3)
        assert said.err.endswith(f"error: {found.why}\nhint: {found.hint}\n"), command


def test_down_ends_a_fleet_of_another_version(other_dispatcher):
    said = other_dispatcher.ok("down -y")
    assert "fleet digits is down: the provider lists nothing of it" in said.err
    assert other_dispatcher.cloud.living() == []


def test_an_agent_of_another_version_is_told_what_its_image_needs_and_its_host_is_replaced(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        stage.agents[host].task.cancel()  # its machine starts again, with another agent
        async with stage.http.ws_connect(stage.url + "/v1/agent", ssl=certs.client_context(stage.ca), headers={
                "Authorization": f"Bearer {stage.token(host)}"}) as ws:
            await ws.send_str(dump(AgentReport(host, "i", "127.0.0.1", 1, protocol=OLD.protocol)))
            answer = load(AgentOrders, (await ws.receive(timeout=10.0)).data)
        why = (f"its agent (protocol {OLD.protocol}) is older than the dispatcher ({OURS.release}, protocol "
               f"{OURS.protocol}); its machine image needs spotfleet {OURS.release}")
        assert answer.refuse == why

        async def replaced() -> bool:
            drains = await stage.events("HostDraining")
            return [e["why"] for e in drains] == [why] and host not in await stage.up(1)

        await stage.until("another host in its place", replaced)

    play(scene, spec(1))


def test_a_fleet_whose_image_is_old_does_not_burn_machines_in_a_loop(play):
    async def scene(stage: Stage) -> None:
        core = stage.daemon.dispatcher.core
        for n in range(5):
            replace_host(core, f"f-{n + 10}", "old")
        assert sorted(core.drains) == ["f-10", "f-11", "f-12"]
        assert sorted(core.incompatible) == [f"f-{n + 10}" for n in range(5)]

    play(scene, spec(1))

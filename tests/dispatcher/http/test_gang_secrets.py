"""The route by which the machines of one launch get their own tokens."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from spotfleet.bootstrap import gang_place
from spotfleet.bootstrap.gang import gang_token, raw_key
from spotfleet.ssh.keys import derived_host_key, pinned
from tests.support.dispatcher.fake_fleet import Stage, spec


async def launched(stage: Stage) -> str:
    """Return a host that the cloud has made and whose agent has not begun. Called before anything else."""
    stage.start_agent = lambda *_: None
    while True:
        _, status = await stage.call("GET", "/v1/status")
        if hosts := [h["host"] for h in status["hosts"] if h["role"] == "worker"]:
            return hosts[0]
        await asyncio.sleep(0.02)


async def asked(stage: Stage, host: str, hosts: list[str], token: str | None = None) -> tuple[int, dict[str, Any]]:
    given = gang_token(stage.boot.fleet_secret, hosts) if token is None else token
    return await stage.call("POST", f"/v1/gangs/{host}", {"hosts": hosts}, token=given, ok=False)


def test_a_member_that_has_not_joined_gets_its_own_token_and_host_key(play):
    async def scene(stage: Stage) -> None:
        waiting = await launched(stage)
        status, said = await asked(stage, waiting, ["f-77", waiting])
        assert (status, said.get("token")) == (200, stage.token(waiting)), said
        boot = stage.cloud.machines[waiting].boot
        assert boot.token == stage.token(waiting) and f'"{boot.token}"' in boot.files["boot.json"]
        public = base64.b64decode(said["host_key"])[32:]
        shown = base64.b64decode(pinned(derived_host_key(stage.boot.fleet_secret, waiting).public).split()[1])
        assert shown.endswith(public)

    play(scene, spec(1))


def test_what_a_machine_runs_gets_them_over_tls(play):
    async def scene(stage: Stage) -> None:
        waiting = await launched(stage)
        hosts = [waiting, "f-77"]
        boot = {"dispatcher": stage.url, "ca": stage.ca}
        secret = stage.boot.fleet_secret
        assert await asyncio.to_thread(gang_place.fetched, boot, gang_token(secret, hosts), hosts, waiting) == (
            stage.token(waiting), raw_key(derived_host_key(secret, waiting)))

    play(scene, spec(1))


def test_nobody_else_gets_them(play):
    async def scene(stage: Stage) -> None:
        waiting = await launched(stage)
        for token in ("", "wrong", gang_token("another", [waiting]), stage.token(waiting), gang_token(
                stage.boot.fleet_secret, ["f-77"])):
            assert (await asked(stage, waiting, [waiting], token))[0] == 401, token
        assert (await asked(stage, waiting, ["f-77"]))[0] == 401  # a gang of others
        assert (await asked(stage, "f-77", ["f-77"]))[0] == 403  # none of the fleet's
        assert (await stage.call("POST", f"/v1/gangs/{waiting}", {"hosts": [1]}, token="", ok=False))[0] == 400
        status, _ = await stage.call("POST", f"/v1/gangs/{waiting}", {"hosts": ["x" * 70_000]}, token="", ok=False)
        assert status == 413

    play(scene, spec(1))


def test_a_host_that_has_joined_has_them_and_nobody_gets_them_any_more(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        assert (await asked(stage, host, [host]))[0] == 403

    play(scene, spec(1))

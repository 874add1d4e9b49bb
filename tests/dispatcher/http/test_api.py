"""The HTTP API: who may do what, files that come and go, and errors that say what to do."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import sqlite3
import tarfile

import aiohttp

from spotfleet.dispatcher.hosts import AgentConnection
from spotfleet.dispatcher.http.app import JSON_BYTES, ROUTES, CallerKind
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.fleet.domain.events import HostDraining
from spotfleet.protocol.messages import (
    JOB_KEY,
    AgentOrders,
    AgentReport,
    OutputPiece,
    WorkerReport,
    WorkerState,
    dump,
    load,
    pack_pieces,
)
from spotfleet.transport import certs
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


async def trained(stage: Stage) -> tuple[str, str, str]:
    """A job that trains on one host: job, host, worker."""
    await stage.up(1)
    job = await stage.submit(Script(steps=LONG), (1, 1))
    status = await stage.at_version(job, 3)
    return job, status.workers[0].host, status.workers[0].worker


def test_no_route_but_the_liveness_check_answers_a_stranger(play):
    async def scene(stage: Stage) -> None:
        assert (await stage.call("GET", "/healthz", token=""))[1] == {"ok": True}
        for route in ROUTES:
            path = re.sub(r"\{\w+(:.*?)?\}", "x", route.path)
            for token in ("", "wrong", host_token("of another fleet", "f-0"), stage.token("f-99")):
                if route.who is CallerKind.ANYBODY or (route.who is CallerKind.SOCKET and token == stage.token("f-99")):
                    continue  # a genuine token: its host may be so new that the ledger's copy in memory lacks it
                status, said = await stage.call(route.method, path, token=token, ok=False)
                assert (status, set(said)) == (401, {"error", "hint", "kind"}), (route, token)

    play(scene, spec(1))


def test_a_host_may_not_do_what_the_cli_does_nor_the_cli_what_a_host_does(play):
    async def scene(stage: Stage) -> None:
        job, host, worker = await trained(stage)
        token = stage.token(host)
        names = {"{host}": host, "{job}": job, "{worker:.+}": worker, "{version}": "5", "{sha256}": "0" * 64,
                 "{driver}": "d1"}
        for route in ROUTES:
            path = "/".join(names.get(part, part) for part in route.path.split("/"))
            if route.who is CallerKind.CLI:
                assert (await stage.call(route.method, path, token=token, ok=False))[0] == 403, route
            if route.who in (CallerKind.AGENT, CallerKind.SOCKET):
                refused = 403 if route.who is CallerKind.AGENT else 401
                assert (await stage.call(route.method, path, ok=False))[0] == refused, route
        assert (await stage.job(job)).state == "running"

    play(scene, spec(1))


def test_a_host_gets_secrets_and_writes_logs_only_for_workers_of_its_own(play):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 1), secrets={"KEY": "hidden-value"})
        mine = (await stage.at_version(job, 3)).workers[0].host
        other = second if mine == first else first
        launch = (await stage.call("GET", f"/v1/jobs/{job}/launch", token=stage.token(mine)))[1]
        assert len(launch["secrets"].pop(JOB_KEY)) == 64
        assert launch["secrets"] == {"KEY": "hidden-value"}
        assert (await stage.call("GET", f"/v1/jobs/{job}/launch", token=stage.token(other), ok=False))[0] == 403
        path = f"/v1/jobs/{job}/logs/{mine}/0/1?offset=0"
        assert (await stage.call("POST", path, token=stage.token(other), data=b"x", ok=False))[0] == 403

    play(scene)


async def say(stage: Stage, token: str, text: str) -> AgentOrders | int:
    """The orders that answer a first frame, or the code with which the connection is closed."""
    headers = {"Authorization": f"Bearer {token}"}
    async with stage.http.ws_connect(stage.url + "/v1/agent", headers=headers,
                                     ssl=certs.client_context(stage.ca)) as ws:
        await ws.send_str(text)
        answer = await ws.receive(timeout=10.0)
        return load(AgentOrders, answer.data) if answer.type is aiohttp.WSMsgType.TEXT else ws.close_code


def test_an_agent_may_report_only_its_own_host(play):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        report = AgentReport(second, "i", "127.0.0.1", 1)
        assert await say(stage, stage.token(first), dump(report)) == 4401
        assert await say(stage, stage.token(first), "no report") == 4401
        for name in (f"{second}/0/1", "no-name", f"{first}/x/1"):
            alien = AgentReport(first, "i", "127.0.0.1", 1, (WorkerState(WorkerReport(name, "job"), 0),))
            assert await say(stage, stage.token(first), dump(alien)) == 4401

    play(scene)


def test_a_late_report_on_a_replaced_connection_loses_no_worker(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        await stage.at_version(job, 3)
        late = AgentReport(host, "i", "127.0.0.1", 1)
        stage.daemon.dispatcher.receive(AgentConnection(host, late, lambda: None), late)
        assert [w.ended for w in stage.daemon.dispatcher.core.jobs[job].workers.all.values()] == [False]

    play(scene, spec(1))


def test_an_agent_of_another_protocol_or_of_an_ended_host_is_told_to_stop(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        old = AgentReport(host, "i", "127.0.0.1", 1, protocol=0)
        answer = await say(stage, stage.token(host), dump(old))
        assert isinstance(answer, AgentOrders) and "protocol 0" in answer.refuse
        stage.cloud.interrupt(host, None)
        await stage.until("the end is known", lambda: host in stage.daemon.dispatcher.core.journal.state.ended)
        answer = await say(stage, stage.token(host), dump(AgentReport(host, "j", "127.0.0.1", 1)))
        assert isinstance(answer, AgentOrders) and "ended" in answer.refuse

    play(scene, spec(1))


def test_bad_input_is_told_by_field(play):
    async def scene(stage: Stage) -> None:
        async def error(method: str, path: str, body=None, data: bytes | None = None) -> tuple[int, str]:
            status, said = await stage.call(method, path, body, data=data, ok=False)
            return status, said["error"]

        assert (await error("POST", "/v1/jobs", {}))[1] == "spec: missing"
        for more, word in (({"min_workers": "2"}, "JobSpec.min_workers"), ({"run": "a", "bundle": "no"}, "bundle"),
                           ({"run": "a", "min_workers": 0}, "min_workers"), ({}, "neither"),
                           ({"run": "a", "max_workers": 10**9}, "max_workers"), ({"run": "\0"}, "NUL"),
                           ({"run": "a", "envs": {"A=B": "c"}}, "spec.envs.A=B"), ({"run": "\ud800"}, "Unicode"),
                           ({"run": "a", "checkpoint": {"interval_s": 10**400}}, "too large"),
                           ({"run": "a", "checkpoint": {"interval_s": -1}}, "interval_s")):
            status, text = await error("POST", "/v1/jobs", {"spec": {"name": "x", **more}})
            assert status == 400 and word in text
        assert "notice_s" in (await error("POST", "/v1/hosts/f-0/interrupt", {"notice_s": 10**400}))[1]
        assert (await error("PUT", "/v1/nodes", {"min": 1, "target": 1, "max": 10**9}))[0] == 400
        assert "notice_s" in (await error("POST", "/v1/hosts/f-0/interrupt", {"notice_s": "soon"}))[1]
        assert (await error("PUT", "/v1/nodes", {"min": 3, "target": 1, "max": 1}))[0] == 400
        assert (await error("PUT", "/v1/nodes", data=b"{}"))[0] == 415
        for text in (b"{", b"[" * 100_000, b'{"min": NaN}', b'{"min": 1e999}'):
            status, told = await error("PUT", "/v1/nodes", data=aiohttp.JsonPayload(text, dumps=bytes.decode))
            assert status == 400 and "the body is no JSON" in told
        assert (await error("GET", "/v1/events?after=x"))[0] == 400
        assert (await error("GET", "/v1/jobs/none-1"))[0] == 404
        assert (await error("POST", "/v1/hosts/f-77/drain", {}))[0] == 404
        assert (await error("GET", "/v1/bundles/../../boot.json"))[0] in (400, 404)
        assert (await error("GET", "/nothing"))[0] == 404
        assert (await error("POST", "/v1/jobs", data=b" " * (JSON_BYTES + 1)))[0] == 413

    play(scene, spec(1))


def test_names_that_no_file_can_have_are_refused_before_one_is_made(play):
    async def scene(stage: Stage) -> None:
        job, host, _ = await trained(stage)
        long, path = "9" * 400, f"/v1/jobs/{job}"
        for method, name in (("GET", f"checkpoints/{long}"), ("PUT", f"checkpoints/{long}?digest={'0' * 64}"),
                             ("GET", "checkpoints/%E0%A5%A7"), ("POST", f"logs/{host}/0/{long}"),
                             ("POST", f"outputs/{host}/{long}/1"), ("POST", f"logs/{host}/0/%00"),
                             ("POST", f"outputs/{host}/../1")):
            status, said = await stage.call(method, f"{path}/{name}", token=stage.token(host), ok=False)
            assert status in (400, 404) and said["error"], name
        assert (await stage.call("GET", f"{path}/logs?worker={host}/0/{long}", ok=False))[0] == 400

    play(scene, spec(1))


def test_a_bundle_is_kept_under_its_digest_only(play):
    async def scene(stage: Stage) -> None:
        data = b"an archive" * 1000
        path = f"/v1/bundles/{hashlib.sha256(data).hexdigest()}"
        assert (await stage.call("HEAD", path, ok=False))[0] == 404
        assert (await stage.call("PUT", path, data=b"something else", ok=False))[0] == 400
        assert (await stage.call("HEAD", path, ok=False))[0] == 404
        await stage.call("PUT", path, data=data)
        assert (await stage.call("HEAD", path))[0] == 200
        first, second = await stage.up(2)
        assert (await stage.call("GET", path, token=stage.token(first), ok=False))[0] == 403
        stage.world.scripts["t"] = Script(steps=LONG)
        await stage.call("POST", "/v1/jobs", {"spec": {"name": "t", "run": "x", "bundle": path.rpartition("/")[2]}})
        mine = (await stage.at_version("t-1", 3)).workers[0].host
        assert (await stage.call("GET", path, token=stage.token(mine)))[1] == data
        other = second if mine == first else first
        assert (await stage.call("GET", path, token=stage.token(other), ok=False))[0] == 403

    play(scene)


def test_a_host_fetches_the_wheel_that_its_dispatcher_was_started_from(play, tmp_path, monkeypatch):
    wheel = tmp_path / "spotfleet-9-py3-none-any.whl"
    wheel.write_bytes(b"the very code" * 1000)
    path = f"/v1/bundles/{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    monkeypatch.setenv("SPOTFLEET_WHEEL", str(wheel))

    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        assert (await stage.call("GET", path, token=stage.token(host)))[1] == wheel.read_bytes()
        assert (await stage.call("GET", path, token=stage.token("d-99"), ok=False))[0] == 401
        other = f"/v1/bundles/{'0' * 64}"
        assert (await stage.call("GET", other, token=stage.token(host), ok=False))[0] == 403

    play(scene, spec(1))


def test_logs_are_followed_to_their_end(play):
    async def scene(stage: Stage) -> None:
        job, host, worker = await trained(stage)

        async def post(offset: int, data: bytes) -> int:
            path = f"/v1/jobs/{job}/logs/{worker.replace('/', '%2F')}?offset={offset}"
            return (await stage.call("POST", path, token=stage.token(host), data=data))[1]["size"]

        assert await post(0, b"one\n") == 4
        follow = asyncio.create_task(read(stage, job, "rank=0&offset=4&wait=20"))
        await asyncio.sleep(0.1)
        assert not follow.done()
        assert await post(99, b"lost\n") == 4
        assert await post(4, b"two\n") == 8
        assert await follow == (b"two\n", "8", None)
        assert (await stage.call("GET", f"/v1/jobs/{job}/workers"))[1] == {"workers": [worker]}
        await stage.call("POST", f"/v1/jobs/{job}/cancel", {})
        assert await read(stage, job, "rank=0&offset=8&wait=20") == (b"", "8", "1")
        assert await read(stage, job, f"worker={worker}&offset=0") == (b"one\ntwo\n", "8", "1")

    play(scene, spec(1))


async def read(stage: Stage, job: str, query: str) -> tuple[bytes, str | None, str | None]:
    async with stage.http.get(f"{stage.url}/v1/jobs/{job}/logs?{query}", headers={"Authorization": f"Bearer {ADMIN}"},
                              ssl=certs.client_context(stage.ca)) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read(), answer.headers.get("X-Offset"), answer.headers.get("X-End")


def test_events_are_waited_for(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        seen = await stage.events()
        waiting = asyncio.create_task(stage.call("GET", f"/v1/events?after={seen[-1]['seq']}&wait=20"))
        await stage.call("PUT", "/v1/nodes", {"min": 1, "target": 1, "max": 3})
        fresh = (await waiting)[1]["events"]
        assert all(e["seq"] > seen[-1]["seq"] for e in fresh) and fresh
        await stage.until("the change", lambda: nodes_changed(stage))

    play(scene, spec(1))


async def nodes_changed(stage: Stage) -> bool:
    return [e["nodes"]["max"] for e in await stage.events("NodesChanged")] == [3]


def test_a_checkpoint_is_kept_whole_and_comes_back_after_a_total_loss(play):
    async def scene(stage: Stage) -> None:
        job, host, _ = await trained(stage)
        data = b"tensors" * 10_000
        digest = hashlib.sha256(data).hexdigest()
        path = f"/v1/jobs/{job}/checkpoints"
        bad = await stage.call("PUT", f"{path}/500?generation=1&digest={'0' * 64}", token=stage.token(host), data=data,
                               ok=False)
        assert bad[0] == 400
        assert (await stage.job(job)).checkpoint == 0
        await stage.call("PUT", f"{path}/500?generation=1&digest={digest}", token=stage.token(host), data=data)
        assert (await stage.job(job)).checkpoint == 500
        assert (await stage.call("GET", f"{path}/500"))[1] == data
        await stage.until("its event", lambda: kept(stage, 500))

        stage.cloud.interrupt(host, None)
        await stage.until("a new generation", lambda: len(stage.world.history) > 1)
        assert stage.world.history[-1][3] == 500  # though the lost worker was not there yet: the newest that is kept
        generation = stage.world.history[-1][1]
        new = (await stage.at_version(job, 501)).workers[0].host
        old = await stage.call("PUT", f"{path}/900?generation={generation - 1}&digest={digest}", token=stage.token(new),
                               data=data, ok=False)
        assert old[0] == 409

    play(scene, spec(1))


def piece(name: str) -> bytes:
    """Five bytes of a worker's output."""
    return pack_pieces([OutputPiece("append", name, 0, 5)], b"0.125")


async def kept(stage: Stage, version: int) -> bool:
    return [e["version"] for e in await stage.events("CheckpointKept")] == [version]


def test_the_archive_holds_what_a_user_wants_home_and_no_secret(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1), secrets={"KEY": "hidden-value"})
        worker = (await stage.at_version(job, 3)).workers[0].worker
        token, data = stage.token(worker.split("/")[0]), b"tensors"
        digest = hashlib.sha256(data).hexdigest()
        await stage.call("POST", f"/v1/jobs/{job}/logs/{worker}?offset=0", token=token, data=b"hello\n")
        output = f"/v1/jobs/{job}/outputs/{worker}"
        assert (await stage.call("POST", output, token=token, data=b"no pieces", ok=False))[0] == 400
        assert (await stage.call("POST", output, token=token, data=piece("../evil.txt"), ok=False))[0] == 400
        for _ in range(2):  # the answer was lost
            told = await stage.call("POST", output, token=token, data=piece("plots/loss.txt"))
            assert told[1] == {"held": [5]}
        assert (await stage.job(job)).output_bytes == 5
        for version in (5, 6):
            await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/{version}?generation=1&digest={digest}", token=token,
                             data=data)
        arriving = stage.home / "jobs" / job / "outputs" / f".{worker.replace('/', '@')}.part"
        arriving.mkdir()
        (arriving / "half").touch()
        archive = (await stage.call("GET", "/v1/archive"))[1]
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            name = worker.replace("/", "@")
            assert set(tar.getnames()) == {"ledger.db", *(f"jobs/{job}/{n}" for n in (
                "checkpoints/6-1.ckpt", f"logs/{name}.log", "logs/rank-0.log", f"outputs/{name}/plots/loss.txt"))}
            assert not any(b"hidden-value" in tar.extractfile(m).read() for m in tar.getmembers())
            tar.extract("ledger.db", stage.home / "brought", filter="data")
        with sqlite3.connect(stage.home / "brought" / "ledger.db") as db:
            rows = [json.loads(r[0])["kind"] for r in db.execute("SELECT body FROM events")]
        assert "JobSubmitted" in rows

    play(scene, spec(1))


def test_an_acknowledged_drain_is_in_the_ledger_and_not_only_in_memory(play):
    async def scene(stage: Stage) -> None:
        host = (await stage.up(1))[0]
        dispatcher = stage.daemon.dispatcher
        await dispatcher.fleet_desk.drain(host)
        written = [e for _, e in dispatcher.core.journal.ledger.events(0) if isinstance(e, HostDraining)]
        assert [(e.request_id, e.why) for e in written] == [(host, "asked by `spotfleet drain`")]

    play(scene, spec(1))

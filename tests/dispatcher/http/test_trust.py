"""Hosts that are trusted no more, or that claim what is not theirs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from spotfleet.dispatcher import reports
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.http import agents
from spotfleet.fleet.domain import events as e
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.planner.plan import Observed, Terminate, Wanted, plan
from spotfleet.model import CloudState, HostState, JobSpec, Market, Offer, Role, Run
from spotfleet.protocol.messages import (
    AgentOrders,
    AgentReport,
    SlotOrder,
    WorkerOrders,
    WorkerReport,
    WorkerState,
    dump,
    load,
)
from spotfleet.transport import certs
from tests.support.dispatcher.fake_fleet import ADMIN, SECRET, Stage, spec
from tests.support.dispatcher.fake_workers import FakeWorker, Script

LONG = 10_000
OFFER = Offer("p", "r", "z", "t", Market.SPOT, 1, 10, 20)


async def trained(stage: Stage) -> tuple[str, str]:
    """A job that trains on both hosts; one of them."""
    await stage.up(2)
    job = await stage.submit(Script(steps=LONG), (1, 2), secrets={"KEY": "hidden-value"})
    await stage.until("both train", lambda: both(stage, job))
    return job, (await stage.job(job)).workers[0].host


async def both(stage: Stage, job: str) -> bool:
    status = await stage.job(job)
    return status.world_size == 2 and status.version > 3


async def greeted(stage: Stage, host: str) -> AgentOrders:
    """What an agent of `host` that connects now hears first."""
    headers = {"Authorization": f"Bearer {stage.token(host)}"}
    async with stage.http.ws_connect(stage.url + "/v1/agent", headers=headers,
                                     ssl=certs.client_context(stage.ca)) as ws:
        await ws.send_str(dump(AgentReport(host, "another", "127.0.0.1", 1)))
        orders = load(AgentOrders, (await ws.receive(timeout=10.0)).data)
        if orders.refuse:
            assert (await ws.receive(timeout=10.0)).type is aiohttp.WSMsgType.CLOSE
        return orders


def test_a_revoked_host_is_refused_on_every_way_at_once_and_replaced(play):
    async def scene(stage: Stage) -> None:
        job, host = await trained(stage)
        version = (await stage.job(job)).version
        stage.cloud.terminate = lambda request_id: None  # only the agent itself, that hears of it, ends the machine
        await stage.call("POST", f"/v1/hosts/{host}/revoke", {"why": "its key leaked"})
        for method, path in (("GET", f"/v1/jobs/{job}/launch"), ("GET", f"/v1/bundles/{'0' * 64}"),
                             ("GET", f"/v1/jobs/{job}/checkpoints/5"), ("POST", f"/v1/jobs/{job}/logs/{host}/0/1"),
                             ("POST", f"/v1/jobs/{job}/outputs/{host}/0/1")):
            assert (await stage.call(method, path, token=stage.token(host), ok=False))[0] == 401
        assert "revoked: its key leaked" in (await greeted(stage, host)).refuse
        await stage.until("the open connection has said so", lambda: not stage.cloud.look(host)[0])
        await stage.until("it is replaced, and the job goes on", lambda: goes_on(stage, job, host, version))
        assert [(x["request_id"], x["why"]) for x in await stage.events("TokenRevoked")] == [(host, "its key leaked")]

    play(scene)


async def goes_on(stage: Stage, job: str, without: str, version: int) -> bool:
    status = await stage.job(job)
    return status.world_size == 2 and status.version > version and without not in {w.host for w in status.workers}


def test_a_revocation_holds_although_the_dispatcher_died_as_soon_as_it_was_written(play):
    async def scene(stage: Stage) -> None:
        job, host = await trained(stage)
        stage.cloud.terminate = lambda request_id: None  # the cloud takes its time
        stage.agents[host].shut = True
        await stage.stop_dispatcher()
        ledger = Ledger(stage.home / "ledger.db")
        ledger.append(e.TokenRevoked(time.time(), host, "stolen"))
        ledger.close()
        await stage.start_dispatcher()
        assert "revoked" in (await greeted(stage, host)).refuse
        assert (await stage.call("GET", f"/v1/jobs/{job}/launch", token=stage.token(host), ok=False))[0] == 401
        await stage.until("the job goes on without it", lambda: goes_on(stage, job, host, 3))

    play(scene)


def test_a_host_is_turned_away_at_once_also_while_a_restarted_dispatcher_waits_for_the_others(play):
    async def scene(stage: Stage) -> None:
        host, silent = await stage.up(2)
        await stage.stop_dispatcher()
        stage.agents[silent].shut = True
        await stage.start_dispatcher()
        await stage.until("it is back", lambda: stage.agents[host].connected)
        stage.cloud.terminate = lambda request_id: None
        await stage.call("POST", f"/v1/hosts/{host}/revoke", {})
        await stage.until("its open connection has said so", lambda: not stage.cloud.look(host)[0])
        assert not stage.daemon.dispatcher.core.settled

    play(scene)


@pytest.mark.parametrize("sent", [100, 500])
def test_what_a_host_is_sending_when_it_is_revoked_is_not_kept(play, sent):
    async def scene(stage: Stage) -> None:
        job, host = await trained(stage)
        data = b"state" * 100

        async def slowly() -> AsyncIterator[bytes]:
            yield data[:sent]
            await stage.call("POST", f"/v1/hosts/{host}/revoke", {})
            if sent < len(data):
                yield data[sent:]

        path = f"/v1/jobs/{job}/checkpoints/7?generation=1&digest={hashlib.sha256(data).hexdigest()}"
        status, _ = await stage.call("PUT", path, token=stage.token(host), data=slowly(), ok=False)
        assert status == 401
        assert (await stage.job(job)).checkpoint == 0
        assert not list((stage.home / "jobs" / job / "checkpoints").glob("*.ckpt"))

    play(scene)


def test_a_machine_that_reports_a_broken_gpu_is_replaced_and_events_and_status_have_the_reason(play):
    async def scene(stage: Stage) -> None:
        host, another = await stage.up(2)
        path, why = f"/v1/hosts/{host}/failed", "a GPU is broken:\nslot 1: 3 uncorrected ECC errors"
        for token in (stage.token(another), ADMIN):
            assert (await stage.call("POST", path, {"why": why}, token=token, ok=False))[0] == 403
        assert (await stage.call("POST", path, {"why": 1}, token=stage.token(host), ok=False))[0] == 400
        stage.cloud.terminate = lambda request_id: None  # it is seen in status
        for _ in range(2):
            await stage.call("POST", path, {"why": why, "broken": True}, token=stage.token(host))
        (told,) = await stage.events("HostFailed")
        line = " ".join(why.split())
        assert (told["request_id"], told["why"], told["broken"]) == (host, line, True)
        assert told["then"].startswith("nothing to do")
        await stage.until("it is replaced", lambda: replaced(stage, host, line))

    play(scene)


async def replaced(stage: Stage, host: str, why: str) -> bool:
    hosts = {h["host"]: h for h in (await stage.call("GET", "/v1/status"))[1]["hosts"] if h["role"] == "worker"}
    return len(hosts) == 3 and why in hosts[host]["why"] and sum(h["state"] == "up" for h in hosts.values()) == 2


def test_only_a_worker_host_of_this_fleet_can_be_revoked_and_only_by_the_admin(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        for name in ("f-77", stage.boot.host):
            status, said = await stage.call("POST", f"/v1/hosts/{name}/revoke", {}, ok=False)
            assert (status, said["hint"]) == (404, f"hosts of this fleet: {host}")
        token = stage.token(host)
        assert (await stage.call("POST", f"/v1/hosts/{host}/revoke", {}, token=token, ok=False))[0] == 403
        assert await stage.events("TokenRevoked") == []

    play(scene, spec(1))


@pytest.mark.parametrize("state", [CloudState.PENDING, CloudState.RUNNING, CloudState.STOPPED])
def test_a_revoked_host_is_ended_and_counts_no_more_whatever_the_cloud_does_with_it(state):
    runs = (Run(1.0, 2.0 if state is CloudState.STOPPED else None),)
    state = fold([
        e.LaunchIntended(0.0, "f-0", Role.WORKER, OFFER, "why"), e.HostListed(1.0, "f-0", "i-0", state, runs),
        e.TokenRevoked(2.0, "f-0", "stolen")])
    actions = plan(Wanted("f", Role.WORKER, 1), state, [OFFER], Observed(settle_until=100.0), now=3.0)
    assert actions[0] == Terminate("f-0", "its token was revoked: stolen")
    assert [type(a).__name__ for a in actions] == ["Terminate", "Launch"]


def test_a_revoked_host_stays_so_when_the_cloud_brings_it_back():
    listed = e.HostListed(1.0, "f-0", "i-0", CloudState.RUNNING, (Run(1.0),))
    state = fold([
        e.LaunchIntended(0.0, "f-0", Role.WORKER, OFFER, "why"), listed,
        e.HostListed(2.0, "f-0", "i-0", CloudState.TERMINATED, (Run(1.0, 2.0),)), e.TokenRevoked(3.0, "f-0", "stolen"),
        e.HostListed(4.0, "f-0", "i-0", CloudState.RUNNING, (Run(1.0, 2.0), Run(4.0))), e.HostJoined(5.0, "f-0", "i")])
    (host,) = state.hosts
    assert host.revoked == "stolen" and not host.counts and host.state is not HostState.DRAINING


def test_slots_beyond_what_the_cloud_sold_do_not_count_and_are_told(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        stage.agents[host].boot["slots"] = 64
        stage.agents[host].said = None  # report at once

        async def told() -> bool:
            shown = next(h for h in (await stage.call("GET", "/v1/status"))[1]["hosts"] if h["host"] == host)
            assert shown["slots"] == 1
            return "claims 64 slots where the cloud sold 1" in shown["why"]

        await stage.until("it is told", told)
        job = await stage.submit(Script(steps=LONG), (1, 8))
        assert (await stage.at_version(job, 5)).world_size == 1

    play(scene, spec(1))


def test_after_a_restart_a_host_gets_no_job_by_claiming_to_have_it(play):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 1), secrets={"KEY": "hidden-value"})
        mine = (await stage.at_version(job, 3)).workers[0].host
        liar = next(h for h in hosts if h != mine)
        await stage.stop_dispatcher()
        order = SlotOrder(f"{liar}/0/1", job, 0, 0, WorkerOrders())
        stage.world.workers[order.worker] = FakeWorker(order, Script(steps=LONG))
        stage.agents[liar].workers.append(order.worker)
        await stage.start_dispatcher()
        await stage.at_version(job, 20)
        assert {w.host for w in (await stage.job(job)).workers} == {mine}
        assert (await stage.call("GET", f"/v1/jobs/{job}/launch", token=stage.token(liar), ok=False))[0] == 403
        path = f"/v1/jobs/{job}/logs/{liar}/0/1?offset=0"
        assert (await stage.call("POST", path, token=stage.token(liar), data=b"x", ok=False))[0] == 403

    play(scene)


def test_who_says_nothing_after_connecting_is_closed_in_time(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(agents, "FIRST_REPORT_S", 0.1)
        headers = {"Authorization": f"Bearer {stage.token('f-99')}"}
        async with stage.http.ws_connect(stage.url + "/v1/agent", headers=headers,
                                         ssl=certs.client_context(stage.ca)) as ws:
            await ws.receive(timeout=10.0)
            assert ws.close_code == agents.UNFIT

    play(scene, spec(1))


def test_a_second_connection_of_a_host_ends_the_first(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        stage.agents[host].shut = True
        await stage.until("its agent has gone", lambda: not stage.agents[host].connected)
        headers = {"Authorization": f"Bearer {stage.token(host)}"}
        report = dump(AgentReport(host, "i", "127.0.0.1", 1))
        tls = certs.client_context(stage.ca)
        async with stage.http.ws_connect(stage.url + "/v1/agent", headers=headers, ssl=tls) as old:
            await old.send_str(report)
            assert (await old.receive(timeout=10.0)).type is aiohttp.WSMsgType.TEXT
            async with stage.http.ws_connect(stage.url + "/v1/agent", headers=headers, ssl=tls) as new:
                await new.send_str(report)
                assert (await new.receive(timeout=10.0)).type is aiohttp.WSMsgType.TEXT
                while (await old.receive(timeout=10.0)).type is aiohttp.WSMsgType.TEXT:
                    continue
                assert old.closed and not new.closed

    play(scene, spec(1))


def said(**fields: object) -> str:
    worker = WorkerState(WorkerReport("f-0/0/1", "job"), 0, 1)
    value = json.loads(dump(AgentReport("f-0", "i", "127.0.0.1", 1, (worker,))))
    for place, new in fields.items():
        inner, *path = value, *place.split("__")
        for key in path[:-1]:
            inner = inner[int(key) if key.isdigit() else key]
        inner[path[-1]] = new
    return json.dumps(value)


@pytest.mark.parametrize(("fields", "word"), [
    ({"slots": 0}, "slots"), ({"slots": -1}, "slots"), ({"slots": 2**60}, "slots"),
    ({"slots": 10**4000}, "slots"),
    ({"incarnation": "x" * 5000}, "incarnation"),
    ({"workers__0__report__worker": "f-1/0/1"}, "no worker of f-0"),
    ({"workers__0__report__worker": "f-0/../1"}, "no worker of f-0"),
    ({"workers__0__report__generation": -1}, "generation"), ({"workers__0__report__version": 2**70}, "version"),
    ({"workers__0__report__step_s": float("nan")}, "NaN"), ({"notice": {"seconds_left": float("inf")}}, "Infinity"),
    ({"workers": [json.loads(said())["workers"][0]] * 2}, "each once"), ({"slots": [[[]]]}, "slots"),
])
def test_a_report_that_makes_no_sense_is_refused_with_its_field(fields, word):
    assert reports.read(said()).slots == 1
    with pytest.raises(ValueError, match=word):
        reports.read(said(**fields))


def test_a_worker_whose_state_is_half_received_may_say_so():
    assert reports.read(said(workers__0__report__version=-1)).workers[0].report.version == -1


def test_a_traceback_of_any_length_is_cut_and_does_not_cost_the_report():
    report = reports.read(said(workers__0__report__error="a" * 100_000 + "the end", why="b" * 100_000))
    error, most = report.workers[0].report.error, reports.MESSAGE_CHARS
    assert error.endswith("the end") and len(error) <= most and len(report.why) <= most


def test_a_hosts_words_lose_their_escape_sequences_before_anything_keeps_them():
    report = reports.read(said(why="a\x1b[2J\nb\x9bc", workers__0__report__error="line 1\nline 2\x07",
                               workers__0__report__resize="\u202ex"))
    assert (report.why, report.workers[0].report.error) == ("a\\x1b[2J\nb\\x9bc", "line 1\nline 2\\x07")
    assert report.workers[0].report.resize == "\\u202ex"
    for field in ("address", "incarnation", "workers__0__report__store"):
        with pytest.raises(ValueError, match="has a control character"):
            reports.read(said(**{field: "10.0.0.1\x1b[2J"}))


def test_a_secret_that_begins_with_another_is_masked_whole_in_the_ledger():
    record = JobRecord("j-1", JobSpec("j", ("train.py", "--token=abcdef")), 0.0)
    assert jobfile.submission(record, {"A": "abc", "B": "abcdef"}).command == "train.py --token=***"


def test_the_ledger_has_the_kind_of_a_job_so_that_it_is_known_after_the_fleets_end():
    assert jobfile.submission(JobRecord("j-1", JobSpec("j", ("a.py",), kind="restart"), 0.0), {}).job_kind == "restart"


def test_a_host_is_told_no_secret_but_its_own_token(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        text = stage.cloud.machines[host].boot.files["boot.json"]
        assert "PRIVATE" not in text and SECRET not in text and ADMIN not in text
        assert json.loads(text)["token"] == stage.token(host)

    play(scene, spec(1))

"""What a watcher gets of a dispatcher: one answer for the page, the end of a log, metrics by a token of their own."""

from __future__ import annotations

import ssl

from spotfleet.codec import from_json
from spotfleet.protocol.messages import Exit, FleetStatus
from spotfleet.protocol.tokens import metrics_token
from spotfleet.transport.certs import SERVER_NAME
from tests.support.dispatcher.fake_fleet import SECRET, Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


def test_one_answer_has_status_events_and_series_and_the_next_only_what_is_new(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.live.history.SAMPLE_S", 0.02)

    async def scene(stage: Stage) -> None:
        (host, _) = await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        await stage.at_version(job, 3)
        stage.kill_worker(host, Exit(-9))

        async def marked() -> dict | None:
            found = (await stage.call("GET", "/v1/live"))[1]
            kept = found["series"].get(job, {"points": [], "marks": []})
            return found if kept["points"] and kept["marks"] else None

        first = await stage.until("a point and a mark", marked)
        status = from_json(FleetStatus, first["status"])
        assert status.jobs[0].job == job and first["events"][-1]["seq"] == first["last"]
        assert first["series"][job]["marks"][0]["cause"] == "death"
        after = (await stage.call("GET", f"/v1/live?after={first['last']}&since={first['now'] + 1000}"))[1]
        assert all(e["seq"] > first["last"] for e in after["events"])
        assert after["series"].get(job, {"points": []})["points"] == []
        anew = (await stage.call("GET", "/v1/live?after=1000000"))[1]
        assert anew["events"][:2] == first["events"][:2] and anew["last"] < 1_000_000

    play(scene, spec(2))


def test_metrics_are_for_the_holder_of_their_token_and_for_the_cli_alone(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        token = metrics_token(SECRET)
        for own in ({"token": token}, {}):
            text = (await stage.call("GET", "/metrics", **own))[1].decode()
            assert 'spotfleet_hosts{fleet="f",state="up",market="spot"} 1\n' in text and text.endswith("# EOF\n")
        refused = [(await stage.call("GET", "/metrics", token=t, ok=False))[0]
                   for t in ("", "wrong", stage.token(host), metrics_token("of another fleet"))]
        assert refused == [401, 401, 403, 401]
        for path in ("/v1/status", "/v1/live", "/v1/events"):
            assert (await stage.call("GET", path, token=token, ok=False))[0] == 401
        await is_trusted_by_a_client_that_checks_names(stage, token)
        # the metrics token is taken where the admin token is not
        monkeypatch.setattr("spotfleet.dispatcher.http.app.is_from_here", lambda _request: False)
        object.__setattr__(stage.daemon.dispatcher.core.boot, "admin_from_here", True)
        assert (await stage.call("GET", "/metrics", ok=False))[0] == 403
        assert (await stage.call("GET", "/metrics", token=token))[0] == 200

    play(scene, spec(1))


async def is_trusted_by_a_client_that_checks_names(stage: Stage, token: str) -> None:
    """Prometheus is one."""
    tls, headers = ssl.create_default_context(cadata=stage.ca), {"Authorization": f"Bearer {token}"}
    async with stage.http.get(f"{stage.url}/metrics", headers=headers, ssl=tls, server_hostname=SERVER_NAME) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"

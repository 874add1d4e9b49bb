"""Checkpoints in an object store, by the whole product: every host is lost, with and without a notice."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest

from spotfleet.providers.local.market.pools import default_rules
from tests.support.e2e.e2e_stage import Stage, hosts_of, output, trains, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.skipif(
    not os.environ.get("SPOTFLEET_LONG"), reason="each side is tested alone in tests/train and tests/dispatcher")]

POOLS = [(p.name, p.capacity) for p in default_rules().pools if p.instance_type == "cpu.small"]


@pytest.fixture
def credentials() -> Iterator[dict[str, str]]:
    """Those of an S3 of our own, in which there is a bucket."""
    server = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
        importlib.import_module("boto3").client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
        yield {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "x",
               "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}
    finally:
        server.stop()


def test_a_job_that_loses_every_host_goes_on_from_the_store_and_says_whether_all_was_saved(
        stage: Stage, credentials: dict[str, str]):
    envs = ", ".join(f"{name}: '{value}'" for name, value in credentials.items())
    fleet = stage.fleet("stored", least=2, target=2,
                        more=f"checkpoint: {{interval: 1s, target: 's3://bucket/runs'}}\nenvs: {{{envs}}}")
    assert "are not copied there" in fleet.status().why
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("a checkpoint", lambda: job.status().checkpoint > 5)
    lost = hosts_of(job)
    for host in lost:
        stage.cloud.interrupt(host, None)
    wait_for("training on others", lambda: trains(job, 2, step=6) and not set(lost) & set(hosts_of(job)))

    for pool, _ in POOLS:
        stage.cloud.set_capacity(pool, 0)
    for host in hosts_of(job):
        stage.cloud.interrupt(host, 8.0)
    wait_for("its word", lambda: any(e["kind"] == "CheckpointInTime" for e in fleet.events()))
    (told,) = [e for e in fleet.events() if e["kind"] == "CheckpointInTime"]
    assert told["kept_version"] == told["version"] > 5
    for pool, capacity in POOLS:
        stage.cloud.set_capacity(pool, capacity)
    wait_for("training", lambda: trains(job, 2, step=told["version"] + 1))
    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)
    kept = [e["url"] for e in fleet.events() if e["kind"] == "CheckpointKept"]
    assert len(kept) > 2 and all(url.startswith("s3://bucket/runs/stored-") for url in kept)
    assert not list((stage.home / "local").rglob("*.distcp"))

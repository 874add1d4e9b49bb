"""Buckets of `file_mounts` on a host: a real S3 server on loopback, through the very process that agents use."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfleet.agent.files import mount_process
from spotfleet.agent.files import mounts as mounts_module
from spotfleet.agent.files.mount_process import MountOrder, MountReport
from spotfleet.protocol.messages import Exit
from tests.support.agent.agent_stage import HOST, Stage, eventually
from tests.support.fakes.cloud_storage import CloudStorage

pytestmark = pytest.mark.processes
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s-3-c-r-e-t", "AWS_REGION": "us-east-1"}


class Cloud:
    """A bucket `data` on an S3 server."""

    def __init__(self, address: str) -> None:
        self.env = {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}
        self.s3: Any = importlib.import_module("boto3").client(
            "s3", endpoint_url=address, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1")

    def put(self, **files: bytes) -> None:
        for name, data in files.items():
            self.s3.put_object(Bucket="data", Key=name.replace("__", "/"), Body=data)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def cloud(server: str) -> Iterator[Cloud]:
    found = Cloud(server)
    found.s3.create_bucket(Bucket="data")
    yield found
    for entry in found.s3.list_objects_v2(Bucket="data").get("Contents", []):
        found.s3.delete_object(Bucket="data", Key=entry["Key"])
    found.s3.delete_bucket(Bucket="data")


@pytest.fixture
def bring(tmp_path: Path, cloud: Cloud):
    """Bring mounts into a job's folder as the agent does; what it said last and on the way."""

    def run(mounts: dict[str, str], job: str = "job",
            env: dict[str, str] | None = None) -> tuple[MountReport, list[str]]:
        into, told = tmp_path / job, []
        into.mkdir(exist_ok=True)
        order = MountOrder(mounts, str(tmp_path / "mounts"), str(into))
        base = {k: os.environ[k] for k in ("PATH", "PYTHONPATH") if k in os.environ}
        chosen = {**base, **(cloud.env if env is None else env)}
        return asyncio.run(mounts_module.fetch(order, chosen, told.append)), told

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_lies_under_a_prefix_comes_with_its_folders_and_nothing_beside_it(tmp_path: Path, cloud: Cloud, bring):
    cloud.put(set__a=b"one", set__deep__er__b=b"two", set__empty=b"", setter=b"beside", set__deep__=b"", set__=b"")
    said, _ = bring({"in/data": "s3://data/set/"})
    assert said == MountReport(done="3 files of 1 mounts, 0.0 kB, of which 0.0 kB were fetched")
    assert contents(tmp_path / "job") == {"in/data/a": b"one", "in/data/deep/er/b": b"two", "in/data/empty": b""}


def test_a_url_that_names_one_object_becomes_a_file_and_a_bucket_as_a_whole_a_folder(tmp_path, cloud, bring):
    cloud.put(set__model=b"weights")
    assert bring({"model.bin": "s3://data/set/model", "all": "s3://data"})[0].done
    assert contents(tmp_path / "job") == {"model.bin": b"weights", "all/set/model": b"weights"}


def test_what_another_job_has_fetched_is_not_fetched_again_but_for_what_has_changed(tmp_path, cloud, bring):
    cloud.put(set__a=b"a" * 5000, set__b=b"b" * 3000)
    assert bring({"data": "s3://data/set"})[0].done.endswith("8.0 kB, of which 8.0 kB were fetched")
    cloud.put(set__b=b"c" * 3000)
    said, _ = bring({"other": "s3://data/set"}, job="second")
    assert said.done.endswith("8.0 kB, of which 3.0 kB were fetched")
    assert contents(tmp_path / "job")["data/b"] == b"b" * 3000  # data of the job before: as it was when that began
    assert contents(tmp_path / "second") == {"other/a": b"a" * 5000, "other/b": b"c" * 3000}


def test_a_file_of_the_cache_that_a_script_has_changed_is_not_given_to_the_next_job(tmp_path, cloud, bring):
    cloud.put(a=b"as it is")
    bring({"data": "s3://data"})
    place = tmp_path / "job/data/a"
    assert place.stat().st_mode & 0o222 == 0
    place.chmod(0o600)
    place.write_bytes(b"changed!")
    bring({"data": "s3://data"}, job="second")
    assert (tmp_path / "second/data/a").read_bytes() == b"as it is"


def test_a_fetch_that_was_killed_goes_on_where_it_was(tmp_path: Path, cloud: Cloud, monkeypatch):
    monkeypatch.setattr(mount_process, "PIECE_BYTES", 1000)
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    data = os.urandom(9500)
    cloud.put(large=data)
    order = MountOrder({"data": "s3://data"}, str(tmp_path / "mounts"), str(tmp_path / "job"))
    asked: list[int] = []
    real = mount_process.Bucket.piece

    def breaks_off(self, item, number, stop):
        if len(asked) >= 4:
            raise KeyboardInterrupt
        asked.append(number)
        return real(self, item, number, stop)

    monkeypatch.setattr(mount_process, "AT_ONCE", 1)
    monkeypatch.setattr(mount_process.Bucket, "piece", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        mount_process.fetch_mounts(order)
    first, asked[:] = list(asked), []
    monkeypatch.setattr(mount_process.Bucket, "piece", lambda s, i, n, stop: asked.append(n) or real(s, i, n, stop))
    mount_process.fetch_mounts(order)
    assert sorted([*first, *asked]) == list(range(10)) and len(first) == 4
    assert (tmp_path / "job/data/large").read_bytes() == data


def test_what_counts_as_fetched_is_on_the_disk_should_the_machine_lose_power(tmp_path: Path, cloud: Cloud, monkeypatch):
    """A file's new size may be on the disk before its contents are: then there are zeros."""
    monkeypatch.setattr(mount_process, "PIECE_BYTES", 1000)
    monkeypatch.setattr(mount_process, "AT_ONCE", 1)
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    large, small = os.urandom(4500), os.urandom(500)
    cloud.put(a_large=large, a_small=small, b_never=b"x")
    order = MountOrder({"data": "s3://data"}, str(tmp_path / "mounts"), str(tmp_path / "job"))
    asked, real, write = [], mount_process.Bucket.piece, os.pwrite
    waiting: dict[int, list[tuple[bytes, int]]] = {}  # in memory alone, by descriptor

    def remember(descriptor: int, data: memoryview, at: int) -> int:
        waiting.setdefault(descriptor, []).append((bytes(data), at))
        return write(descriptor, bytes(len(data)), at)

    def sync(descriptor: int) -> None:
        for data, at in waiting.pop(descriptor, []):
            write(descriptor, data, at)

    def until_the_power_is_gone(self, item, number, stop):
        if item.path == "b_never":
            raise KeyboardInterrupt
        return real(self, item, number, stop)

    with monkeypatch.context() as running:
        running.setattr(mount_process.os, "pwrite", remember)
        running.setattr(mount_process.os, "fsync", sync)
        running.setattr(mount_process.Bucket, "piece", until_the_power_is_gone)
        with pytest.raises(KeyboardInterrupt):
            mount_process.fetch_mounts(order)
    monkeypatch.setattr(mount_process.Bucket, "piece", lambda s, i, n,
                        stop: asked.append(i.path) or real(s, i, n, stop))
    mount_process.fetch_mounts(order)
    assert asked == ["b_never"]
    assert contents(tmp_path / "job") == {"data/a_large": large, "data/a_small": small, "data/b_never": b"x"}


def test_an_object_that_changes_while_it_is_fetched_is_fetched_anew_and_never_mixed(tmp_path, cloud, monkeypatch):
    monkeypatch.setattr(mount_process, "PIECE_BYTES", 1000)
    monkeypatch.setattr(mount_process, "AT_ONCE", 1)
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    cloud.put(large=b"a" * 3000)
    real, asked = mount_process.Bucket.piece, []

    def changes(self, item, number, stop):
        asked.append(number)
        if len(asked) == 2:
            cloud.put(large=b"b" * 3000)
        return real(self, item, number, stop)

    monkeypatch.setattr(mount_process.Bucket, "piece", changes)
    mount_process.fetch_mounts(MountOrder({"data": "s3://data"}, str(tmp_path / "mounts"), str(tmp_path / "job")))
    assert (tmp_path / "job/data/large").read_bytes() == b"b" * 3000


def test_a_folder_in_google_cloud_storage_comes_as_one_in_s3(tmp_path: Path, monkeypatch):
    with CloudStorage(["data"]) as google:
        for name, value in google.environ().items():
            monkeypatch.setenv(name, value)
        expected = {f"set/{name}": name.encode() * 3000 for name in ("a", "b/c", "d")}
        for name, content in (expected | {"set/b/": b"", "setter": b"beside"}).items():
            google.put("data", name, content)
        monkeypatch.setattr(mount_process, "PIECE_BYTES", 1000)
        order = MountOrder({"data": "gs://data/set"}, str(tmp_path / "mounts"), str(tmp_path / "job"))
        mount_process.fetch_mounts(order)
        assert contents(tmp_path / "job/data") == {name.removeprefix("set/"): c for name, c in expected.items()}


def test_how_far_it_is_is_told_while_files_come(tmp_path: Path, cloud: Cloud, monkeypatch, capsys):
    for name, value in {"PIECE_BYTES": 1 << 18, "PROGRESS_S": 0.005, "AT_ONCE": 1}.items():
        monkeypatch.setattr(mount_process, name, value)
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    cloud.put(large=bytes(3_000_000))
    mount_process.fetch_mounts(MountOrder({"data": "s3://data/large"}, str(tmp_path / "mounts"), str(tmp_path / "job")))
    told = [json.loads(line)["why"] for line in capsys.readouterr().out.splitlines()]
    assert told and all(re.fullmatch(r"fetching s3://data/large: \d\.\d of 3\.0 MB", t) for t in told)


@pytest.mark.parametrize(("url", "changes", "expected"), [
    ("s3://missing/x", {}, "there is no bucket 'missing' (looked up with AWS_REGION, AWS_ENDPOINT_URL)"),
    ("s3://data/nothing", {}, "there is nothing at s3://data/nothing"),
    ("s3://data", {}, "there is nothing at s3://data"),
    ("s3://data", dict.fromkeys(KEYS) | {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"},
     "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY under `secrets`, or give the machine a "
     "role"),
])
def test_what_every_host_would_hear_is_sure_and_says_what_to_do(cloud: Cloud, bring, url: str, changes: dict, expected):
    env = {k: v for k, v in {**cloud.env, **changes}.items() if v is not None}
    assert bring({"data": url}, env=env)[0] == MountReport(error=f"file_mounts.data: {expected}", sure=True)


def test_a_store_that_cannot_be_reached_may_be_this_hosts_trouble(cloud: Cloud, bring):
    said, _ = bring({"data": "s3://data/x"}, env={**cloud.env, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    assert not said.sure and said.error.startswith("file_mounts.data: s3://data/x cannot be read from this host: ")


def test_names_that_would_lead_out_are_refused(tmp_path: Path, cloud: Cloud, bring):
    cloud.put(**{"set/../../evil": b"x"})
    said, _ = bring({"data": "s3://data"})
    assert said.sure and not said.done
    assert not list(tmp_path.rglob("evil"))
    (tmp_path / "job" / "link").symlink_to(tmp_path)
    cloud.s3.delete_object(Bucket="data", Key="set/../../evil")
    cloud.put(a=b"x")
    assert bring({"link": "s3://data"})[0].error == (
        "file_mounts: link/a is a folder or a link in the working directory")


def test_room_is_looked_for_before_anything_is_fetched(tmp_path: Path, cloud: Cloud, monkeypatch):
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    cloud.put(a=bytes(2_000_000))
    monkeypatch.setattr(mount_process, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(mount_process.MountFailed) as failed:
        mount_process.fetch_mounts(MountOrder({"data": "s3://data"}, str(tmp_path / "mounts"), str(tmp_path / "job")))
    assert failed.value.report.full and failed.value.report.error.startswith(
        "file_mounts need 2.0 MB more, and this host's disk is full: ")
    assert sorted(p.name for p in (tmp_path / "mounts").iterdir()) == [".lock"]


def test_it_says_what_to_install_where_obstore_is_missing(tmp_path: Path):
    (tmp_path / "obstore.py").write_text("raise ImportError('hidden by this test')")
    order = json.dumps({"mounts": {"data": "s3://data"}, "cache": str(tmp_path / "c"), "into": str(tmp_path)})
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run([sys.executable, "-m", "spotfleet.agent.files.mount_process"], input=order + "\n", text=True,
                          check=True,
                          capture_output=True, env=env)
    said = json.loads(done.stdout)
    assert said["sure"] and 'add "obstore>=0.6" to `environment.packages`' in said["error"]


def test_a_workers_script_finds_its_buckets_and_setup_does_too(stage: Stage, cloud: Cloud):
    cloud.put(set__a=b"one")
    stage.boot()
    ended = stage.run("print(open('data/a').read(), open('seen').read())", setup="cat data/a data/a > seen",
                      envs={k: v for k, v in cloud.env.items() if "KEY" not in k},
                      secrets={k: v for k, v in cloud.env.items() if "KEY" in k}, file_mounts={"data": "s3://data/set"})
    assert (ended.exit, stage.log()) == (Exit(0, done=True), "one oneone\n")
    assert not any(b"s-3-c-r-e-t" in p.read_bytes() for p in stage.home.rglob("*") if p.is_file())


def test_a_missing_bucket_is_told_as_what_another_host_would_hear_and_a_changed_one_is_found_at_the_next_try(
        stage: Stage, cloud: Cloud):
    stage.boot()
    ended = stage.run("print(open('data').read())", envs=cloud.env, file_mounts={"data": "s3://data/late"})
    assert (ended.exit, ended.report.setup_tries, ended.report.setup_sure) == (Exit(1), 1, True)
    assert ended.report.error == "file_mounts.data: there is nothing at s3://data/late"
    cloud.put(late=b"there")
    stage.order(f"{HOST}/0/2")
    assert stage.dispatcher.wait_worker(f"{HOST}/0/2", lambda w: w.exit).exit == Exit(0, done=True)
    eventually(lambda: stage.log(f"{HOST}/0/2") == "there\n")

"""Rules of the executors that need no Ray: parameters, numbers of actors, random hosts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import spotfleet.ray
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.protocol.messages import Checkpoint, WorkerReport
from spotfleet.ray import ElasticExecutor, ElasticParams, ElasticRayExecutor, RayExecutor, TestDiscovery
from spotfleet.ray.executor import check_gpus
from spotfleet.ray.installed import About, check_same
from spotfleet.ray.run import detached
from spotfleet.ray.run.checkpoints import CheckpointTarget, RunCheckpoints, newest, target_of
from spotfleet.ray.run.record import PackedCall
from spotfleet.ray.run.staffing import ActorStage, Cooldown, StaffChange, StaffMember, gpu_place, room_on, staff_change
from spotfleet.version import install

HEAD = "SPOTFLEET_RAY_HEAD"
ASKED, IDLE, RUNS = ActorStage.ASKED, ActorStage.IDLE, ActorStage.RUNS


def test_the_names_of_horovods_documentation_are_here():
    assert {"ElasticRayExecutor", "RayExecutor", "ElasticParams", "TestDiscovery", "ray_logger", "create_settings",
            "ElasticExecutor"} <= set(dir(spotfleet.ray))
    assert callable(spotfleet.ray.ray_logger.log)
    with pytest.raises(AttributeError, match="no attribute 'Executor'"):
        _ = spotfleet.ray.Executor


class _ClusterWithoutGpus:
    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 4.0}


def test_gpus_are_waited_for_on_a_fleets_cluster_where_hosts_come_for_them_and_refused_elsewhere(monkeypatch):
    monkeypatch.delenv(HEAD, raising=False)
    with pytest.raises(UsageError, match="no node of the cluster has a GPU"):
        check_gpus(_ClusterWithoutGpus, ElasticParams(use_gpu=True))
    check_gpus(_ClusterWithoutGpus, ElasticParams(use_gpu=False))
    monkeypatch.setenv(HEAD, "10.0.0.1:6379")
    check_gpus(_ClusterWithoutGpus, ElasticParams(use_gpu=True))


def test_without_ray_an_executor_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray cannot be imported") as refused:
        ElasticExecutor(min_workers=1).start()
    assert refused.value.hint == install("ray") and "[ray]" in install("ray")


@pytest.mark.parametrize(("given", "names"), [
    ({"min_workers": 3, "max_workers": 2}, "max_workers is 2 and min_workers is 3"),
    ({"min_workers": 0}, "min_workers is 0"),
    ({"min_workers": 1, "max_workers": 1.5}, "max_workers is 1.5"),
    ({"cpus_per_worker": 0}, "cpus_per_worker is 0"),
    ({"gpus_per_worker": 1}, "use_gpu is not set"),
    ({"use_gpu": True, "gpus_per_worker": 0}, "gpus_per_worker is 0"),
    ({"cooldown_range": (5, 1)}, "cooldown_range"),
    ({"override_discovery": False}, "settings.discovery is not set"),
])
def test_impossible_parameters_are_refused_when_they_are_given(given, names):
    with pytest.raises(UsageError, match=names) as refused:
        ElasticExecutor(**given)
    assert refused.value.hint


def test_both_generations_of_names_make_the_same_parameters():
    settings = ElasticRayExecutor.create_settings(verbose=True, min_np=2, max_np=4, reset_limit=7, elastic_timeout=60)
    older = ElasticRayExecutor(settings, use_gpu=True, cpus_per_slot=2, gpus_per_slot=1)
    newer = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=4, use_gpu=True, cpus_per_worker=2,
                        gpus_per_worker=1, reset_limit=7, elastic_timeout=60)
    slots = RayExecutor(settings, min_workers=2, use_gpu=True, cpus_per_slot=2, gpus_per_slot=1)
    assert slots.elastic.params == older.params
    assert older.params == newer.elastic.params == ElasticParams(
        2, 4, reset_limit=7, elastic_timeout=60, cpus_per_worker=2, use_gpu=True, gpus_per_worker=1)


def test_a_static_executor_counts_hosts_times_workers():
    assert RayExecutor(num_hosts=2, num_workers_per_host=3).num_workers == 6
    assert RayExecutor(num_hosts=2, num_slots=3).num_workers == 6
    with pytest.raises(UsageError, match="one of num_workers, num_hosts and min_workers"):
        RayExecutor(num_workers=2, min_workers=1)
    with pytest.raises(UsageError, match="one of"):
        RayExecutor()


def test_calls_that_need_fixed_workers_are_refused_when_elastic():
    for call in ("run_remote", "execute_single"):
        with pytest.raises(UsageError, match=f"{call} is not for an elastic executor"):
            getattr(ElasticExecutor(min_workers=1), call)(print)
    with pytest.raises(UsageError, match="executable_cls"):
        ElasticExecutor(min_workers=1).start(executable_cls=dict)


def test_the_missing_actors_are_asked_for():
    staff = [StaffMember(1, RUNS, member=True), StaffMember(2, ASKED)]
    assert staff_change(staff, 4, complete=False) == StaffChange(2, ())


def test_an_actor_on_a_node_that_goes_is_replaced_before_it_ends():
    staff = [StaffMember(1, RUNS, member=True), StaffMember(2, RUNS, member=True, leaving=True)]
    assert staff_change(staff, 2, complete=False) == StaffChange(1, ())


def test_too_many_actors_end_with_the_requests_first_and_never_members():
    staff = [StaffMember(1, RUNS, member=True), StaffMember(2, RUNS), StaffMember(3, IDLE), StaffMember(4, ASKED)]
    assert staff_change(staff, 2, complete=False) == StaffChange(0, (4, 3))
    assert staff_change(staff[:1], 0, complete=False) == StaffChange(0, ())


def test_an_evicted_actor_ends_and_another_one_is_asked_for():
    staff = [StaffMember(1, RUNS, member=True), StaffMember(2, RUNS, wanted=False)]
    assert staff_change(staff, 2, complete=False) == StaffChange(1, (2,))


def test_once_a_function_has_returned_no_actor_starts_and_those_that_wait_end():
    staff = [StaffMember(1, RUNS, member=True), StaffMember(2, IDLE), StaffMember(3, ASKED)]
    assert staff_change(staff, 5, complete=True) == StaffChange(0, (2, 3))


def test_any_staff_settles_at_the_wanted_number():
    rng = random.Random(7)
    for _ in range(1000):
        staff = [StaffMember(n, rng.choice(list(ActorStage)), rng.random() < 0.4, rng.random() < 0.2,
                             rng.random() < 0.9) for n in range(rng.randint(0, 8))]
        wanted = rng.randint(0, 8)
        change = staff_change(staff, wanted, complete=False)
        stay = [s for s in staff if s.number not in change.end and not s.leaving]
        members = sum(s.member and s.wanted and not s.leaving for s in staff)
        assert len(stay) + change.start == max(wanted, members)
        assert not (change.start and len(stay) + change.start > wanted)
        assert all(s.wanted for s in staff if s.number not in change.end)


def test_the_first_loss_is_replaced_at_once_and_later_ones_without_a_step_more_and_more_slowly():
    cooldown = Cooldown(None)
    waits = []
    for _ in range(8):
        cooldown.lost(100.0)
        waits.append(max(0.0, cooldown.until - 100.0))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    cooldown.progressed(1)
    assert cooldown.losses == 0


def test_the_users_range_bounds_the_wait():
    cooldown = Cooldown((2, 5))
    waits = []
    for _ in range(3):
        cooldown.lost(0.0)
        waits.append(cooldown.until)
    assert waits == [2, 4, 5]


def test_a_node_has_room_for_whole_workers_only():
    assert room_on({"CPU": 7.0, "GPU": 2.0}, 2, 0) == 3
    assert room_on({"CPU": 7.0, "GPU": 2.0}, 2, 1) == 2
    assert room_on({"CPU": 7.0}, 2, 1) == 0
    assert room_on({"CPU": 0.3}, 0.1, 0) == 3


def test_a_worker_chooses_its_gpu_by_its_place_among_those_that_its_node_shows():
    assert gpu_place(("1",), (), 4) == (1, "0,1,2,3")
    assert gpu_place(("3",), ("2", "3"), 2) == (1, "2,3"), "a raylet that was limited to some GPUs"
    assert gpu_place(("MIG-b",), ("MIG-a", "MIG-b"), 2) == (1, "MIG-a,MIG-b")
    assert gpu_place(("0", "1"), (), 4) == gpu_place((), (), 4) == (None, ""), "it sees its own alone"


def test_ray_client_is_refused_by_name(monkeypatch):
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True,
                                                            util=SimpleNamespace(client=client)))
    with pytest.raises(UsageError, match=r"by Ray Client \(ray://\)"):
        ElasticExecutor(min_workers=1).start()


def test_random_hosts_change_by_one_between_the_least_and_the_most():
    now, nodes = [0.0], {f"n{i}": {"CPU": 2.0} for i in range(5)}
    found = TestDiscovery(2, 4, 10.0, seed=3, nodes=lambda: nodes, clock=lambda: now[0])
    sizes = []
    for _ in range(40):
        hosts = found.find_available_hosts_and_slots()
        assert set(hosts) <= set(nodes) and set(hosts.values()) == {2}
        sizes.append(len(hosts))
        assert found.find_available_hosts_and_slots() == hosts  # nothing changes before the time has come
        now[0] += 10.0
    assert set(sizes) == {2, 3, 4} and all(abs(a - b) == 1 for a, b in itertools.pairwise(sizes))
    del nodes["n0"]
    assert "n0" not in found.find_available_hosts_and_slots()


def test_random_hosts_have_sensible_bounds():
    with pytest.raises(UsageError, match="min_hosts is 3 and max_hosts is 2"):
        TestDiscovery(3, 2, 1.0)


@pytest.mark.parametrize(("ray", "python", "names"), [
    ("2.9.0", "3.11", "Ray 2.9.0"), ("2.60.0", "3.12", "Python 3.12")])
def test_a_node_with_another_version_is_named(ray, python, names):
    about = About("ab" * 14, "10.0.0.7", 1, ray, python)
    with pytest.raises(UsageError, match=rf"node abababababab \(10.0.0.7\) has {names}"):
        check_same(about, "2.60.0", "3.11")
    check_same(About("ab", "10.0.0.7", 1, "2.60.0", "3.11"), "2.60.0", "3.11")


def kept(version: int, generation: int, text: str = "") -> Checkpoint:
    return Checkpoint(version, text or f"{version}-{generation}", 10, generation, url=f"s3://b/{version}-{generation}")


def reported(made: Checkpoint | None = None, damaged: Checkpoint | None = None) -> WorkerReport:
    return WorkerReport("a/0/1", "ray", checkpoint=made, damaged=damaged, damaged_why="__0_0.distcp is not there")


def test_the_newest_checkpoint_is_that_of_the_latest_generation():
    run = RunCheckpoints(CheckpointTarget("s3://b"))
    for made in (kept(40, 1), kept(60, 1), kept(50, 2), kept(40, 1)):  # generation 2 went back to version 40
        run.take(reported(made))
    assert run.newest == kept(50, 2) and run.version == 50


def test_a_damaged_checkpoint_gives_way_to_the_one_beside_it_and_is_not_taken_again():
    run = RunCheckpoints(CheckpointTarget("s3://b"), kept(60, 2))
    assert run.take_remarks() == ["begins with the checkpoint of version 60 at s3://b/60-2"]
    run.take(reported(kept(40, 2), damaged=kept(60, 2)))
    run.take(reported(kept(60, 2), damaged=kept(60, 2)))
    assert run.newest == kept(40, 2)
    assert run.take_remarks() == ["checkpoint of version 60 cannot be used: __0_0.distcp is not there"]
    assert run.take_remarks() == []


def test_a_checkpoint_that_lies_on_one_node_alone_does_not_count():
    run = RunCheckpoints(CheckpointTarget("s3://b"))
    run.take(reported(replace(kept(40, 1), url="", path="/tmp/40-1")))
    assert run.newest is None


@pytest.mark.parametrize(("given", "every_s", "names"), [
    ("checkpoints", 60.0, "'checkpoints', which is not an absolute path"),
    ("file://here", 60.0, "'file://here', which is not an absolute path"),
    ("ftp://host/folder", 60.0, "checkpoint_target is 'ftp://host/folder'"),
    ("s3://", 60.0, "checkpoint_target is 's3://'"),
    ("/mnt/run", 0.0, "checkpoint_every_s is 0.0")])
def test_an_impossible_target_for_checkpoints_is_refused(given, every_s, names):
    with pytest.raises(UsageError, match=names) as refused:
        ElasticExecutor(checkpoint_target=given, checkpoint_every_s=every_s)
    assert refused.value.hint


def test_the_newest_whole_checkpoint_at_a_target_is_found(tmp_path):
    def write(name: str, *, whole: bool, listed: str = "") -> str:
        version, generation = (listed or name).split("-")
        data = json.dumps({"version": int(version), "generation": int(generation), "files": {
            ".metadata": {"bytes": 4, "sha256": "0" * 64}}})
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(data)
        if whole:
            (tmp_path / name / ".metadata").write_text("meta")
        return hashlib.sha256(data.encode()).hexdigest()

    target = target_of(str(tmp_path), 60.0)
    assert newest(target) is None
    digest = write("50-2", whole=True)
    write("60-1", whole=True)  # generation 2 went back to an earlier version
    write("70-2", whole=False)
    write("80-2", whole=True, listed="90-2")  # another one's manifest
    found = newest(target)
    assert found is not None and (found.version, found.generation, found.digest) == (50, 2, digest)
    assert found.url == f"file://{tmp_path}/50-2"


def test_a_target_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpotfleetError, match=r"checkpoint_target file://.*/file/run cannot be read"):
        newest(target_of(f"{tmp_path}/file/run", 60.0))


class MemoryRecords(dict):
    """Ray's control service, in which records outlive a coordinator."""

    def of(self, name: str, token: str) -> SimpleNamespace:
        return SimpleNamespace(read=lambda: self.get(token), write=lambda record: self.__setitem__(token, record))


class QuietJob:
    """A run that trains for ever, without Ray."""

    def __init__(self, *_) -> None:
        self.begun, self.limits, self.changes = 0, None, []
        self.ended = threading.Event()

    def begin(self, work) -> None:
        self.begun += 1

    def resize(self, *limits) -> None:
        self.limits = limits


@pytest.fixture
def coordinators(monkeypatch):
    """Coordinators of one executor, one after the other."""
    records = MemoryRecords()
    monkeypatch.setattr(detached, "RecordStore", records.of)
    monkeypatch.setattr(detached, "ElasticJob", QuietJob)
    monkeypatch.setattr(PackedCall, "owned_here", lambda self: None)
    monkeypatch.setenv("STORE_KEY", "the driver's")
    return lambda **given: detached.CoordinatorActor("nightly", "0", ElasticParams(2, 4, **given),
                                                     {"STORE_KEY": "the run's"}, 0, None)


CALL = PackedCall("7", b"", b"", b"")


def test_a_call_that_is_sent_again_begins_no_second_run(coordinators):
    coordinator = coordinators()
    assert os.environ["STORE_KEY"] == "the run's"  # it reads the checkpoints, too
    coordinator.begin(CALL)
    coordinator.begin(CALL)
    assert coordinator._job.begun == 1
    coordinator.begin(replace(CALL, number="8"))
    assert coordinator._job.begun == 2


def test_a_coordinator_goes_on_with_the_run_of_one_that_was_lost_and_with_its_newest_limits(coordinators):
    first = coordinators(checkpoint_target="/kept")
    assert first._job.begun == 0
    first.begin(CALL)
    first.resize(None, 3)
    second = coordinators(checkpoint_target="/kept")
    assert (second._job.begun, second._job.limits) == (1, (2, 3)) and "placed anew" in second.changes()[0]
    second.begin(CALL)  # the driver had no answer from the first one
    assert second._job.begun == 1


def test_without_a_checkpoint_the_run_of_a_lost_coordinator_has_failed(coordinators):
    coordinators().begin(CALL)
    second = coordinators()
    with pytest.raises(SpotfleetError, match="'nightly' was lost, and its workers with it"):
        second.progress(0).end.get()
    assert second.standing().phase == "ended" and second.changes() == []
    second.begin(replace(CALL, number="8"))
    assert second._job.begun == 1

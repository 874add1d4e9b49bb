"""Elastic training on a Ray cluster whose workers and nodes are really killed: all of it on one cluster."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.ray import ElasticExecutor, ElasticRayExecutor, RayExecutor, TestDiscovery, drains, ray_logger
from spotfleet.ray.drains import drain_node, draining
from spotfleet.ray.functions import by_value
from spotfleet.ray.run import elastic_job, static_job
from tests.ray.conftest import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def train_until(folder: str):
    """A script of Horovod's documentation, with a file that shows its progress."""
    import torch

    import spotfleet.train as hvd

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    pid = os.getpid()

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, 10**6):  # noqa: B020
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            with open(f"{folder}/{pid}", "a") as file:
                file.write(f"{time.monotonic()} {state.batch} {hvd.size()} {hvd.rank()}\n")
            time.sleep(0.01)
            if os.path.exists(f"{folder}/stop") and state.batch >= int(Path(f"{folder}/stop").read_text()):
                break

    train(hvd.elastic.TorchState(model, optimizer, batch=0))
    return hvd.rank(), model.weight.sum().item()


def steps(folder) -> dict[int, list[tuple[float, int, int, int]]]:
    found = {}
    for file in folder.iterdir():
        if file.name.isdigit():
            rows = [line.split() for line in file.read_text().splitlines() if line.count(" ") == 3]
            found[int(file.name)] = [(float(a), int(b), int(c), int(d)) for a, b, c, d in rows]
    return found


def sizes(folder) -> set[int]:
    """World sizes in the newest steps of processes that train."""
    now = time.monotonic()
    return {rows[-1][2] for rows in steps(folder).values() if rows and now - rows[-1][0] < 2.0}


def stop(folder: Path) -> None:
    """Let all ranks finish after the same step, which none has made yet."""
    (folder / "stop.part").write_text(str(max(r[1] for rows in steps(folder).values() for r in rows) + 20))
    (folder / "stop.part").rename(folder / "stop")


class Run:
    """A run in a thread, with the progress that its workers write."""

    def __init__(self, executor: ElasticExecutor, folder: Path) -> None:
        self.folder, self.results, self.error = folder, [], None
        self._executor = executor
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results = self._executor.run(train_until, args=[str(self.folder)])
        except Exception as error:  # noqa: BLE001 - `ends` raises it
            self.error = error

    def trains_on(self, size: int) -> None:
        eventually(lambda: not self._thread.is_alive() or sizes(self.folder) == {size})
        assert self._thread.is_alive(), self.error

    def next_step_on(self, size: int, since: float) -> float:
        """Return the seconds from `since` to the first step of a world of this size."""
        def rows() -> list[float]:
            return [r[0] for made in steps(self.folder).values() for r in made if r[2] == size and r[0] > since]

        eventually(lambda: not self._thread.is_alive() or rows())
        return min(rows()) - since

    def ends(self) -> list[Any]:
        """Let all workers finish."""
        stop(self.folder)
        self._thread.join(timeout=120)
        if self.error is not None:
            raise self.error
        assert not self._thread.is_alive()
        return self.results

    def no_step_was_repeated(self) -> bool:
        return all(len({r[1] for r in rows}) == len(rows) for rows in steps(self.folder).values())


def node_of(cluster, pid: int) -> Any:
    return next(n for n in cluster.nodes if pid in [p.pid for p in cluster.workers_of(n)])


def test_training_survives_a_killed_worker_a_drained_node_and_a_lost_one(cluster, shut_down, tmp_path):
    """The example of Horovod's documentation, with the import changed. The world is 3 of 4 nodes, so that a spare node
    takes each lost worker's place."""
    settings = ElasticRayExecutor.create_settings(verbose=True, min_np=2, max_np=3)
    executor = shut_down(ElasticRayExecutor(settings, cpus_per_slot=1))
    executor.start()
    run = Run(executor, tmp_path)
    run.trains_on(3)

    killed, victim = time.monotonic(), next(iter(steps(tmp_path)))
    os.kill(victim, signal.SIGKILL)
    print(f"SIGKILL of a worker: next step after {run.next_step_on(2, killed):.3f} s")
    run.trains_on(3)

    pid = next(p for p, rows in steps(tmp_path).items() if time.monotonic() - rows[-1][0] < 2.0)
    node, drained = node_of(cluster, pid), time.monotonic()
    assert drain_node(cluster.address, node.node_id, "spot notice", 60.0)
    assert 50 < eventually(lambda: draining().get(node.node_id)) <= 60
    eventually(lambda: time.monotonic() - steps(tmp_path)[pid][-1][0] > 3.0)
    left = steps(tmp_path)[pid][-1][0]
    assert sizes(tmp_path) == {3} and left - drained < 50, "replaced before it left"
    assert min(r[2] for rows in steps(tmp_path).values() for r in rows if r[0] > drained) == 3, "one at a time"
    assert run.no_step_was_repeated()
    cluster.lose(node)

    cluster.add()
    pid = next(p for p, rows in steps(tmp_path).items() if time.monotonic() - rows[-1][0] < 2.0)
    lost = time.monotonic()
    cluster.lose(node_of(cluster, pid))
    print(f"loss of a node: next step after {run.next_step_on(2, lost):.3f} s")
    run.trains_on(3)

    results = run.ends()
    assert [rank for rank, _ in results] == [0, 1, 2] and len({weights for _, weights in results}) == 1
    print("\n".join(executor.changes))


def fails(step: int) -> None:
    import spotfleet.train as hvd

    hvd.init()
    os.environ["CHECKED"] = "yes"
    raise ValueError(f"no data for step {step} on rank {hvd.rank()}")


def leaves() -> None:
    os._exit(7)


def test_an_error_of_the_function_arrives_with_its_own_traceback(cluster, shut_down, monkeypatch):
    executor = shut_down(ElasticExecutor(min_workers=1, max_workers=1))
    executor.start()
    with pytest.raises(ValueError, match="no data for step 7 on rank 0") as failed:
        executor.run(fails, kwargs={"step": 7})
    assert "in fails" in str(failed.value.__cause__) and "raise ValueError" in str(failed.value.__cause__)
    # a process that ends by itself is started again, and not for ever
    monkeypatch.setattr(elastic_job, "LOSSES", 2)
    with pytest.raises(SpotfleetError, match="2 workers in a row have ended without a step"):
        executor.run(leaves)
    # and each run has fresh processes
    assert executor.run(about_itself)[0]["checked"] is None


def returns_a_lock(file: str) -> Any:
    with open(file, "a") as log:
        log.write("called\n")
    return threading.Lock()


def test_a_value_that_cannot_be_sent_is_named_and_the_function_is_not_called_again(cluster, shut_down, tmp_path):
    executor = shut_down(ElasticExecutor(min_workers=1, max_workers=1))
    executor.start()
    with pytest.raises(UsageError, match=r"what the function returns.* cannot be sent .*cannot pickle '_thread.lock'"):
        executor.run(returns_a_lock, args=[str(tmp_path / "log")])
    assert (tmp_path / "log").read_text() == "called\n"


def about_itself() -> dict[str, Any]:
    return {"main": threading.current_thread() is threading.main_thread(), "omp": os.environ.get("OMP_NUM_THREADS"),
            "given": os.environ.get("GIVEN"), "torch": "torch" in sys.modules, "pid": os.getpid(),
            "checked": os.environ.get("CHECKED"), "key": "SPOTFLEET_JOB_KEY" in os.environ,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "frozen": gc.get_freeze_count() > len(gc.get_objects())}


def about_gpus() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SPOTFLEET_LOCAL_RANK")


def exits() -> None:
    sys.exit(0)


def test_functions_run_in_the_main_thread_with_the_environment_set_before_torch(cluster, shut_down):
    executor = shut_down(ElasticExecutor(min_workers=2, max_workers=2, cpus_per_worker=0.5))
    executor.start(extra_env_vars={"GIVEN": "1", "OMP_NUM_THREADS": "3"})
    found = executor.run(about_itself)
    assert len({f.pop("pid") for f in found}) == 2 and not any(f.pop("gpus") for f in found)
    assert found == 2 * [{"main": True, "omp": "3", "given": "1", "torch": True, "checked": None, "key": True,
                          "frozen": True}]
    assert executor.run(exits) == [None, None]  # the end by sys.exit(0) is an end, not a loss


def counts(epochs: int) -> tuple[int, list[int]]:
    """The training function of Horovod's page on Ray, with its reset callback: the last world, and those before."""
    import torch

    import spotfleet.train as hvd
    from spotfleet.ray import ray_logger

    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    resets = []

    def on_state_reset():
        resets.append(hvd.size())

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):  # noqa: B020
            if hvd.rank() == 0:
                ray_logger.log({"epoch": state.epoch, "size": hvd.size()})
            while True:
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                time.sleep(0.02)
                if hvd.size() == state.epoch + 1:
                    break
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    return hvd.size(), resets


def test_callbacks_get_logged_values_and_grow_the_world(cluster, shut_down):
    """Epoch N ends once N + 1 workers train: without the growth it would never end."""
    settings = RayExecutor.create_settings(verbose=True)
    executor = shut_down(RayExecutor(settings, min_workers=1, max_workers=1, use_gpu=False, cpus_per_slot=1))
    executor.start()
    seen: list[tuple[int, int]] = []

    def grow(info: dict[str, int]) -> None:
        seen.append((info["epoch"], info["size"]))
        executor.elastic.resize(max_workers=info["epoch"] + 1)

    results = executor.run(counts, args=[3], callbacks=[grow])
    assert [size for size, _ in results] == [3, 3, 3] and results[0][1] == [2, 3]
    assert [epoch for epoch, _ in seen] == sorted(epoch for epoch, _ in seen) and {e for e, _ in seen} == {0, 1, 2}


def simple_fn(added: int = 0) -> int:
    import torch

    import spotfleet.train as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
    assert total.item() == hvd.size()
    return hvd.rank() + added


class Model:
    """The stateful example of Horovod's documentation."""

    def __init__(self, learning_rate: float) -> None:
        import torch

        import spotfleet.train as hvd

        hvd.init()
        torch.manual_seed(hvd.rank())
        self.model = torch.nn.Linear(2, 1)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=learning_rate))

    def train(self) -> float:
        import torch

        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, 2)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def get_weights(self) -> list[float]:
        return self.model.weight.flatten().tolist()


def test_a_fixed_number_of_workers_runs_horovods_static_examples(cluster, shut_down):
    import ray

    executor = shut_down(RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=2))
    executor.start(executable_cls=Model, executable_args=[0.1])
    assert executor.run(simple_fn) == [0, 1]
    assert ray.get(executor.run_remote(simple_fn, kwargs={"added": 10})) == [10, 11]
    losses = [executor.execute(lambda worker: worker.train()) for _ in range(5)]
    assert losses[4][0] < losses[0][0]
    first, second = executor.execute(lambda worker: worker.get_weights())
    assert first == second == executor.execute_single(lambda worker: worker.get_weights())
    with pytest.raises(ZeroDivisionError, match="1 // 0"):
        executor.run(lambda: 1 // 0)
    with pytest.raises(SpotfleetError, match="a worker was lost") as lost:
        executor.run(leaves)
    assert lost.value.hint == "ElasticExecutor goes on without it"


def test_a_module_that_the_nodes_do_not_have_travels_with_its_function(cluster, shut_down, tmp_path, monkeypatch):
    (tmp_path / "of_the_driver.py").write_text("FACTOR = 3\n\ndef triple(n):\n    return FACTOR * n\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("of_the_driver")
    executor = shut_down(RayExecutor(num_workers=1, cpus_per_worker=0.5))
    executor.start()
    assert executor.run(module.triple, args=[5]) == [15]
    # and a node with another version is named, also where it joins late
    monkeypatch.setattr(elastic_job, "own_python", lambda: "3.99")
    monkeypatch.setattr(static_job, "own_python", lambda: "3.99")
    elastic = shut_down(ElasticExecutor(min_workers=1, max_workers=1, cpus_per_worker=0.5))
    elastic.start()
    with pytest.raises(UsageError, match=r"node \w+ \(127.0.0.2\) has Python 3.\d+, and the driver 3.99"):
        elastic.run(about_itself)
    with pytest.raises(UsageError, match=r"and the driver 3\.99"):
        shut_down(RayExecutor(num_workers=1, cpus_per_worker=0.5)).start()


def test_a_module_is_sent_by_value_while_anybody_needs_it_and_as_the_user_has_set_it(cluster, tmp_path, monkeypatch):
    (tmp_path / "recipes.py").write_text("def train():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipes, pickle = importlib.import_module("recipes"), importlib.import_module("ray.cloudpickle")

    def is_sent() -> bool:
        return "recipes" in pickle.list_registry_pickle_by_value()

    with by_value(recipes.train):
        with by_value(recipes.train):
            assert is_sent()
        assert is_sent(), "another executor still sends it"
    assert not is_sent()
    pickle.register_pickle_by_value(recipes)
    with by_value(recipes.train):
        pass
    assert is_sent(), "the user has set it"
    pickle.unregister_pickle_by_value(recipes)


def test_each_worker_sees_all_gpus_of_its_node_and_chooses_by_its_local_rank(cluster, shut_down, monkeypatch):
    """Ray shows an actor its own GPU alone. The GPUs are invented: Ray counts them, and nobody uses them."""
    with pytest.raises(UsageError, match="no node of the cluster has a GPU"):
        ElasticExecutor(min_workers=1, use_gpu=True).start()
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,5")  # those of the machine that its raylet may use
        node = cluster.add(gpus=2)
    executor = shut_down(ElasticExecutor(min_workers=2, max_workers=2, cpus_per_worker=0.5, use_gpu=True))
    executor.start()
    try:
        found = executor.run(about_gpus)
        assert sorted(found) == [("4,5", "0"), ("4,5", "1")]
    finally:
        executor.shutdown()
        cluster.lose(node)


def test_more_fixed_workers_than_the_cluster_has_room_for(cluster, shut_down):
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(SpotfleetError, match=r"of 2 workers were placed within 1 s; the cluster has room for 0"):
        shut_down(RayExecutor(settings, num_workers=2, cpus_per_worker=2)).start()


def test_a_cluster_that_is_too_small_is_waited_for_and_then_named(cluster, shut_down):
    executor = shut_down(ElasticExecutor(min_workers=2, cpus_per_worker=2, elastic_timeout=1))
    executor.start()
    with pytest.raises(SpotfleetError, match=r"no training for elastic_timeout \(1 s\): .*room for 0 of 2 workers"):
        executor.run(about_itself)


DRIVER = """
import sys
import ray
from spotfleet.ray import ElasticExecutor
from tests.ray.test_elastic_executor import train_until
ray.init(sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
executor = ElasticExecutor(min_workers=2, max_workers=2, detached="nightly")
executor.start()
executor.run(train_until, args=[sys.argv[3]])
"""


def test_a_detached_run_outlives_its_driver(cluster, shut_down, tmp_path):
    from tests.ray.conftest import ADDRESS

    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, ADDRESS, str(tmp_path)])
    try:
        eventually(lambda: driver.poll() is not None or sizes(tmp_path) == {2})
    finally:
        driver.kill()
        assert driver.wait() == -signal.SIGKILL
    ended = time.monotonic()
    eventually(lambda: all(rows[-1][0] > ended + 3 for rows in steps(tmp_path).values()))
    executor = shut_down(ElasticExecutor.attach("nightly"))
    assert executor.status().phase == "running" and len(executor.status().members) == 2
    first = set(steps(tmp_path))  # a replacement gets the function although its driver is gone
    os.kill(min(first), signal.SIGKILL)
    eventually(lambda: steps(tmp_path).keys() - first and sizes(tmp_path) == {2})
    with pytest.raises(UsageError, match="'nightly' exists already"):
        ElasticExecutor(detached="nightly").start()
    with pytest.raises(UsageError, match="max_workers is 1 and min_workers is 2"):
        executor.resize(max_workers=1)
    stop(tmp_path)
    assert [rank for rank, _ in executor.result()] == [0, 1]
    executor.shutdown()
    with pytest.raises(UsageError, match="no executor named 'nightly'"):
        ElasticExecutor.attach("nightly")


def test_hosts_that_come_and_go_at_random_repeat_no_step(cluster, shut_down, tmp_path):
    settings = ElasticRayExecutor.create_settings(min_np=1, max_np=3)
    settings.discovery = TestDiscovery(min_hosts=1, max_hosts=3, change_frequency_s=2, seed=5)
    executor = shut_down(ElasticRayExecutor(settings, override_discovery=False))
    executor.start()
    run = Run(executor, tmp_path)
    try:
        eventually(lambda: len({r[2] for rows in steps(tmp_path).values() for r in rows}) >= 2 or run.error)
    finally:
        print(executor.status(), *executor.changes, sep="\n")
    assert run.error is None
    run.ends()
    assert run.no_step_was_repeated()


def test_a_node_that_has_just_gone_costs_no_loss(cluster, shut_down, monkeypatch):
    """Hosts by discovery are asked for by name, and Ray refuses a node that it has lost since."""
    gone = "e" * 56
    nodes = drains.alive_nodes()
    monkeypatch.setattr(elastic_job.drains, "alive_nodes", lambda: {gone: {"CPU": 1.0}, **nodes})
    settings = ElasticRayExecutor.create_settings(min_np=1, max_np=1)
    settings.discovery = SimpleNamespace(find_available_hosts_and_slots=lambda: dict.fromkeys([gone, *nodes], 1))
    executor = shut_down(ElasticRayExecutor(settings, override_discovery=False))
    executor.start()
    assert len(executor.run(about_itself)) == 1


def test_what_cannot_be_pickled_is_named_with_its_variable(cluster):
    lock = threading.Lock()

    def train() -> None:
        lock.acquire()

    executor = ElasticExecutor(min_workers=1)
    with pytest.raises(UsageError, match=r"function .*train cannot be sent .* variable 'lock' \(a lock\)") as refused:
        executor.run(train)
    assert refused.value.hint == "create 'lock' inside the function"
    with pytest.raises(UsageError, match=r"args\[1\] of about_itself cannot be sent"):
        executor.run(about_itself, args=[1, lock])
    with pytest.raises(UsageError, match="3 is not a function"):
        executor.run(3)
    with pytest.raises(UsageError, match="not started"):
        executor.run(about_itself)


def test_a_worker_logs_numbers_only_and_nothing_outside_of_a_run():
    ray_logger.log({"loss": object()})


def test_no_process_of_an_executor_is_left(cluster):
    """Runs last: those of the tests above have been shut down."""
    def left() -> list[str]:
        names = []
        for node in cluster.nodes:
            for process in cluster.workers_of(node):
                try:
                    names.append(" ".join(process.cmdline()))
                except psutil.NoSuchProcess:
                    continue
        return [n for n in names if "TrainingActor" in n or "CoordinatorActor" in n]

    eventually(lambda: not left())

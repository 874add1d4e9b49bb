"""Parallel simulation runs."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest

from spotfleet.simulate.parallel import run_all


def double(task, watch):
    watch(0.5)
    return 2 * task


def fail(task, watch):
    raise ValueError(f"task {task}")


def only_in(process, task, watch):
    """Every other process is killed, as by a machine without memory."""
    if os.getpid() != process:
        os.kill(os.getpid(), signal.SIGKILL)
    return double(task, watch)


def last(folder, task, watch):
    """Half a minute unless it is given up; then it leaves a file."""
    for n in range(3000):
        watch(n / 3000)
        time.sleep(0.01)
    (folder / str(task)).touch()


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_what_was_found_comes_in_the_order_of_the_tasks(processes, chunk_size):
    shares = []
    assert run_all(double, range(10), shares.append, chunk_size, processes) == [2 * n for n in range(10)]
    assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 10


def test_one_process_tells_parts_of_runs():
    shares = []
    run_all(double, range(3), shares.append, 1, 1)
    assert shares == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_run_goes_on(processes):
    with pytest.raises(ValueError, match="task 0"):
        run_all(fail, [0], lambda done: None, 1, processes)


def test_a_killed_process_of_the_pool_costs_time_and_no_result():
    assert run_all(partial(only_in, os.getpid()), range(4), lambda done: None, 1, 2) == [0, 2, 4, 6]


def test_other_processes_tell_parts_of_runs_that_go_on_and_give_up_what_nobody_waits_for(tmp_path):
    def interrupted(done):
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(partial(last, tmp_path), range(2), interrupted, 1, 2)
    assert not list(tmp_path.iterdir())

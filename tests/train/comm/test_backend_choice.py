"""One backend for all generations of a job."""

from __future__ import annotations

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train.comm import backends
from spotfleet.train.comm.backends import choose_backend
from tests.support.train.thread_fleet import Lost


@pytest.mark.parametrize(("settled", "local_size", "devices", "chosen"), [
    ("gloo", 1, 8, "gloo"),
    ("nccl", 2, 1, "nccl"),
    ("nccl", 3, 2, "nccl"),  # here for one of the two that have a device
])
def test_a_later_generation_keeps_what_the_first_has_chosen(settled, local_size, devices, chosen):
    assert choose_backend("auto", local_size, devices, settled) == chosen


@pytest.mark.parametrize("asked", ["auto", "nccl"])
@pytest.mark.parametrize(("devices", "local_rank"), [(0, 0), (2, 2)])
def test_a_worker_that_cannot_follow_the_jobs_choice_blames_its_host(devices, local_rank, asked):
    with pytest.raises(UsageError, match=f"NCCL, and worker {local_rank} of this host finds {devices}") as refusal:
        choose_backend(asked, 1, devices, "nccl", local_rank)
    assert refusal.value.blame_host


def test_a_change_of_membership_is_no_change_of_backend(threads, monkeypatch):
    """Here devices appear once the first generation trains; on a host with fewer workers than before they suffice."""
    kinds = []

    def script(worker):
        hvd.init()
        state = hvd.elastic.ObjectState(step=0)

        def train(state):
            kinds.append((hvd.size(), worker.runtime.group.backend, worker.control.report.backend))
            monkeypatch.setattr(backends, "visible_devices", lambda: 8)
            while state.step < 4:
                hvd.allreduce(torch.ones(1))
                if worker.name == "h1/0/1":
                    raise Lost
                state.step += 1
                state.commit()
            return True

        return hvd.elastic.run(train)(state)

    threads(script, founders=2).finish()
    assert set(kinds) == {(2, "gloo", "gloo"), (1, "gloo", "gloo")}

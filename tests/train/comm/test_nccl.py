"""What the runtime does about kernels that nobody told of a peer's death, on a made-up device (see stuck_group.py)."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import STUCK_EXIT, Assignment
from spotfleet.train import default_group
from spotfleet.train.comm import nccl
from spotfleet.train.comm.backends import choose_backend, make_group
from spotfleet.train.comm.group import check_alike
from spotfleet.train.comm.nccl_environment import (
    CONNECT_LIMIT_S,
    EnvironmentLoan,
    connect_limit_s,
    no_detail,
    untested,
    variables,
)
from spotfleet.train.gradients.reducer import Reducer
from spotfleet.train.state import handover
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.sockets import interface_of
from spotfleet.worker.store import open_store
from tests.support.train.stuck_group import END_LIMIT_S, GARBAGE, StuckGroup

LATE = {"late_s": 0.02}


def waits(condition, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def test_results_are_awaited_by_the_host_before_anybody_reads_them(ranks):
    three = ranks(3, StuckGroup, **LATE)
    sums = three.each(lambda g: g.allreduce(torch.tensor([float(g.rank)])).item())
    parts = three.each(lambda g: [int(t) for t in g.allgather(torch.tensor([g.rank]))])
    told = three.each(lambda g: int(g.broadcast(torch.tensor([g.rank]), 2)))
    assert (sums, parts, told) == ([3.0] * 3, [[0, 1, 2]] * 3, [2] * 3)


def test_a_peers_death_unblocks_nobody_until_the_group_is_aborted_from_another_thread(ranks):
    two = ranks(2, StuckGroup)
    told = threading.Event()

    def work(group):
        if group.rank == 1:
            group._cut()  # as a killed process leaves its peers: connections end, and nobody aborts
            return None
        threading.Thread(target=lambda: (told.wait(20), group.abort())).start()
        threading.Timer(0.3, told.set).start()
        with pytest.raises(CommBroken):
            group.allreduce(torch.ones(1000))
        return told.is_set()

    assert two.each(work)[0] is True


@pytest.mark.parametrize("garbage", [False, True])
def test_what_an_abort_left_in_a_tensor_is_never_taken_for_a_sum(ranks, garbage, monkeypatch):
    """After an abort the event behind a reduction is reached, as after a success, here between two looks at it."""
    two = ranks(2, StuckGroup, garbage=garbage)
    monkeypatch.setattr(nccl, "SPIN_S", 0.0)
    monkeypatch.setattr(nccl, "NAP_S", 1.0)
    stepped: list[int] = []

    def work(group):
        p = nn.Parameter(torch.zeros(3))
        reducer = Reducer([p], 1, True, lambda: group, lambda r: None,
                          lambda r, change, save: stepped.append(group.rank), lambda: None)
        if group.rank == 1:
            group._cut()
            return None
        threading.Timer(0.2, group.abort).start()
        with pytest.raises(CommBroken):
            p.sum().backward()
        reducer.reset()
        return p.grad, float(reducer._buckets.flats[0].max()) == GARBAGE

    assert two.each(work)[0] == (None, garbage) and stepped == []


def test_an_event_that_is_reached_because_of_an_abort_is_no_success():
    class Aborted(StuckGroup):
        def _record_event(self):
            return self

        def query(self) -> bool:
            self.aborted = True  # it is set before the communicator is touched
            return True

    group = Aborted(Assignment(1, 0, ("a/0/1",), "127.0.0.1:9"), "job", "127.0.0.1", "key")
    group._stream.close()
    assert "aborted" in str(group._wait([], 20.0))


def test_when_a_call_has_failed_nothing_of_the_communicator_is_left_to_write_into_tensors(ranks):
    two = ranks(2, StuckGroup, garbage=True)

    def work(group):
        if group.rank == 1:
            group._cut()
            return None
        works = [group.launch(torch.ones(10)) for _ in range(5)]
        threading.Timer(0.1, group.abort).start()
        with pytest.raises(CommBroken):
            group.finish(works)
        return group._ended.is_set(), all(w.work.is_completed() for w in works)

    assert two.each(work)[0] == (True, True)


def test_an_error_that_nccl_did_notice_ends_the_wait_without_an_order(ranks):
    two = ranks(2, StuckGroup)

    def work(group):
        if group.rank == 1:
            group._cut()
            return None
        threading.Timer(0.1, lambda: setattr(group._comm, "error", "REMOTE_ERROR")).start()
        with pytest.raises(CommBroken, match="REMOTE_ERROR"):
            group.allreduce(torch.ones(3))
        return group.aborted

    assert two.each(work)[0] is True


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_has_ended_ends_the_wait_without_an_order_and_one_that_is_slow_does_not(
        ranks, monkeypatch, ends):
    """torch's watchdog may be blind, and the dispatcher lost."""
    monkeypatch.setattr("spotfleet.train.comm.order.STALL_S", 0.05)
    monkeypatch.setattr("spotfleet.worker.connectivity.REFUSED_AGAIN_S", 0.05)
    two = ranks(2, StuckGroup)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as held:
        port = held.getsockname()[1]
        if ends:
            held.close()
        for group in two.groups:
            group._known_peers = [("b/0/1", f"127.0.0.1:{port}")]

        def work(group):
            if group.rank == 1:
                group._cut()
                return ""
            if not ends:
                threading.Timer(1.0, group.abort).start()
            with pytest.raises(CommBroken) as found:
                group.allreduce(torch.ones(3))
            return str(found.value)

        assert ("b/0/1 at 127.0.0.1: the process has ended" in two.each(work)[0]) is ends


def test_an_error_noticed_only_after_the_event_still_fails_the_reduction(ranks):
    two = ranks(2, StuckGroup)

    def work(group):
        flight = group.launch(torch.ones(3))
        passed = group._record_event()
        assert waits(passed.query)

        class Mark:
            done = passed.done

            def query(self):
                group._comm.error = "COMM_ERROR"
                return True

        group._record_event = Mark
        with pytest.raises(CommBroken, match="COMM_ERROR"):
            group.finish([flight])

    assert two.each(work) == [None, None]


def test_after_an_error_only_the_thread_with_a_limit_ends_the_communicator(ranks):
    """torch's own wait would do it in the thread that trains, without a limit."""
    two = ranks(2, StuckGroup)

    def work(group):
        flight, comm = group.launch(torch.ones(3)), group._comm
        comm.error = "REMOTE_ERROR"
        with pytest.raises(CommBroken, match="REMOTE_ERROR"):
            group.finish([flight])
        return comm.ended_by

    assert two.each(work) == [["spotfleet-abort"]] * 2


def test_a_launch_after_an_error_does_not_wait_for_torchs_watchdog(ranks):
    two = ranks(2, StuckGroup)
    for group in two.groups:  # before either launches: the first to fail ends the other's group
        group._comm.error = "REMOTE_ERROR"

    def work(group):
        began = time.monotonic()
        flight = group.launch(torch.ones(3))
        launched_s = time.monotonic() - began
        with pytest.raises(CommBroken):
            group.finish([flight])
        return launched_s < 30  # it would be a minute

    assert two.each(work, limit_s=90) == [True, True]


def test_a_rank_that_ends_later_than_others_does_not_make_them_exit_as_stuck(ranks, monkeypatch):
    monkeypatch.setattr(nccl, "END_LIMIT_S", 0.2)
    left: list[str] = []
    monkeypatch.setattr(StuckGroup, "_exit_stuck", lambda self, why: left.append(why))
    two = ranks(2, StuckGroup)
    comm = two.groups[0]._comm
    comm.late_to_close.clear()
    reaper = two.groups[0].retire()
    reaper.join(1.0)
    assert reaper.is_alive() and not comm.ended_by  # data that a peer still lacks must arrive
    comm.late_to_close.set()
    reaper.join(20)
    assert not reaper.is_alive() and left == [] and not comm.lives


@pytest.mark.parametrize("returns", [True, False])
def test_an_abort_waits_for_a_launch_in_progress_unless_that_never_returns(ranks, monkeypatch, returns):
    monkeypatch.setattr(nccl, "LAUNCH_LIMIT_S", 30.0 if returns else 0.2)
    entered, go_on = threading.Event(), threading.Event()

    def slow(pg, tensor):
        entered.set()
        go_on.wait(20)
        return pg.allreduce([tensor], dist.AllreduceOptions())

    two = ranks(2, StuckGroup)
    group, found = two.groups[0], []
    comm = group._comm
    thread = threading.Thread(target=lambda: found.append(group._start(slow, torch.ones(1))))
    thread.start()
    assert entered.wait(20)
    group.abort()
    if returns:
        assert not comm.aborted.wait(0.3)
        go_on.set()
    assert waits(comm.aborted.is_set)
    go_on.set()
    thread.join(20)
    with pytest.raises(CommBroken):
        group._start(slow, torch.ones(1))


def test_a_launch_after_an_abort_never_reaches_the_communicator(ranks):
    group = ranks(2, StuckGroup).groups[0]
    group.abort()
    with pytest.raises(CommBroken):
        group._start(lambda pg, t: pytest.fail("it was launched"), torch.ones(1))


def test_the_layout_says_which_ranks_share_a_host(ranks):
    assert ranks(3, StuckGroup).each(lambda g: g.layout) == [(0, 0, 0)] * 3


def test_another_layout_of_as_many_ranks_is_said_in_one_line(alone, monkeypatch, capfd):
    monkeypatch.setattr(default_group, "enter", lambda group, place: None)
    for generation, backend, layout in ((1, "nccl", (0, 0, 2, 2)), (2, "nccl", (0, 0, 2, 2)), (3, "nccl", (0, 1, 0, 1)),
                                        (4, "nccl", (0, 0, 0)), (5, "gloo", (0, 1, 2))):
        alone.has_formed(SimpleNamespace(generation=generation, backend=backend, layout=layout))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "from generation 3 on" in said[0] and "(0 1 | 2 3 -> 0 2 | 1 3)" in said[0]


def test_a_job_of_many_workers_has_longer_to_form():
    limits = [connect_limit_s({"SPOTFLEET_WORKERS": text}) for text in ("2:2", "2:", "8:512", "")]
    assert limits == [CONNECT_LIMIT_S, CONNECT_LIMIT_S, CONNECT_LIMIT_S + 64, CONNECT_LIMIT_S]
    assert variables({"SPOTFLEET_WORKERS": "8:512"}, "")["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "79"
    assert connect_limit_s({"SPOTFLEET_WORKERS": "8:512", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20"}) == 20


def test_an_abort_that_waits_for_the_kernels_of_an_iteration_does_not_make_its_rank_exit(ranks, monkeypatch):
    """ncclCommAbort waits for all that the user has queued before the reduction. A tenth of the real times."""
    monkeypatch.setattr(nccl, "END_LIMIT_S", END_LIMIT_S / 10)
    left: list[str] = []
    monkeypatch.setattr(StuckGroup, "_exit_stuck", lambda self, why: left.append(why))
    two = ranks(2, StuckGroup)

    def work(group):
        if group.rank == 1:
            group._cut()
            return None
        group._stream.launch(lambda: time.sleep(1.5))
        flight = group.launch(torch.ones(3))
        threading.Timer(0.05, group.abort).start()
        began = time.monotonic()
        with pytest.raises(CommBroken):
            group.finish([flight])
        return time.monotonic() - began > 1.0

    assert two.each(work) == [True, None] and left == [] and END_LIMIT_S >= 35


def test_a_job_that_is_done_does_not_exit_as_stuck_because_an_abort_hangs(ranks, monkeypatch):
    monkeypatch.setattr(nccl, "END_LIMIT_S", 0.2)
    left: list[str] = []
    monkeypatch.setattr(StuckGroup, "_exit_stuck", lambda self, why: left.append(why))
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "0")
    group, other = ranks(2, StuckGroup, abort_hangs=True).groups
    other._comm._abort_hangs = False
    group._comm.shutdown = lambda: (_ for _ in ()).throw(RuntimeError("a peer is gone"))
    reaper = group.retire()
    reaper.join(60)
    assert not reaper.is_alive() and left == []


def test_every_thread_of_a_group_uses_the_groups_device(ranks):
    """A thread whose current device is another one opens a context there, of some hundred MB."""
    group = ranks(2, StuckGroup).groups[0]
    group.abort()
    assert group._ended.wait(20)
    assert group.entered == ["spotfleet-form", "spotfleet-abort", "spotfleet-idle"]


def test_a_tensor_on_another_device_than_the_communicators_is_refused_and_breaks_nothing(ranks):
    two = ranks(2, StuckGroup)

    def work(group):
        own, group.device = group.device, torch.device("cpu", 1)
        with pytest.raises(UsageError, match="NCCL uses cpu:1 here, but a tensor is on cpu") as refusal:
            group.allreduce(torch.ones(3))
        group.device = own
        return "set_device" in refusal.value.hint, group.allreduce(torch.ones(1)).item()

    assert two.each(work) == [(True, 2.0)] * 2


def test_an_abort_just_before_the_communicator_comes_to_be_still_ends_it(ranks, monkeypatch):
    two = ranks(2, StuckGroup, form=False)
    late = two.groups[0]
    comms = []

    class Open:
        def __init__(self, group):
            self._group, self._open = group, group._open

        def __call__(self, store):
            made, comm = self._open(store)
            comms.append(comm)
            connect = comm.eager_connect_single_device

            def connect_late(device):
                self._group.abort()
                assert self._group._ended.wait(20)
                connect(device)
                two.groups[1].abort()

            comm.eager_connect_single_device = connect_late
            return made, comm

    late._open = Open(late)
    errors = two.each(lambda g: g.form())
    assert type(errors[0]) is CommBroken
    assert waits(lambda: len(comms[0].ended_by) == 2) and not comms[0].lives


def test_a_peer_that_never_comes_is_given_up_after_the_limit_of_a_collective(ranks, monkeypatch):
    two = ranks(2, StuckGroup)
    monkeypatch.setattr("spotfleet.train.comm.group.COLLECTIVE_LIMIT_S", 0.2)

    def work(group):
        if group.rank == 0:
            with pytest.raises(CommBroken, match="a peer did not come"):
                group.allreduce(torch.ones(3))
        return group.aborted

    assert two.each(work) == [True, False]


REMARKS = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
SEARCH = """
Search for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."""


class FailedDevice(StuckGroup):
    """Rank whose device fails while it waits."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(Assignment(1, 0, ("a/0/1",), "127.0.0.1:9"), "job", "127.0.0.1", "key")
        self.error, self.left = error, ""
        self._stream.close()

    def _record_event(self):
        raise self.error

    def _exit_stuck(self, why: str) -> None:
        self.left = why


def cuda_error(text: str, name: str, code: int, numbered: bool) -> RuntimeError:
    """Return the error as torch words it, whose newer versions add the number."""
    whole = f"CUDA error: {text}{SEARCH.format(name) if numbered else ''}{REMARKS}"
    error = torch.AcceleratorError(whole) if numbered else RuntimeError(whole)
    if numbered:
        error.error_code = code
    return error


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize(("text", "name", "code"), [
    ("device-side assert triggered", "cudaErrorAssert", 710),
    ("an illegal memory access was encountered", "cudaErrorIllegalAddress", 700),
    ("misaligned address", "cudaErrorMisalignedAddress", 716),
    ("out of memory", "cudaErrorMemoryAllocation", 2),
])
def test_a_failed_kernel_of_the_user_is_the_users_error_and_no_loss_of_a_peer(text, name, code, numbered):
    wanted = cuda_error(text, name, code, numbered)
    with pytest.raises(RuntimeError) as found:
        FailedDevice(wanted)._wait([], 20.0)
    assert found.value is wanted


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize(("text", "name", "code"), [
    ("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable", 214),
    ("uncorrectable NVLink error detected during the execution", "cudaErrorNvlinkUncorrectable", 220),
    ("unspecified launch failure", "cudaErrorLaunchFailure", 719),
    ("unknown error", "cudaErrorUnknown", 999),
])
def test_a_lost_device_is_no_error_of_the_user(text, name, code, numbered):
    """torch ends each text with a remark on device-side assertions."""
    wanted = cuda_error(text, name, code, numbered)
    group = FailedDevice(wanted)
    assert group._wait([], 20.0) is wanted
    assert group.left.startswith(f"the device is lost: CUDA error: {text}")


@pytest.mark.parametrize(("why", "host"), [
    (f"the device is lost: CUDA error: unspecified launch failure{REMARKS}", True),
    (f"idle failed: CUDA error: uncorrectable ECC error encountered{REMARKS}", True),
    (f"idle failed: CUDA error: device-side assert triggered{REMARKS}", False),  # by what an abort left in a tensor
    ("abort took more than 40 s", False),
])
def test_the_last_report_blames_the_host_for_a_lost_device_alone(monkeypatch, why, host):
    reports, left = [], []
    monkeypatch.setattr(nccl.os, "_exit", left.append)
    group = StuckGroup(Assignment(1, 0, ("a/0/1",), "127.0.0.1:9"), "job", "127.0.0.1", "key", lambda g: None,
                       lambda text, blamed: reports.append((text, blamed)))
    group._stream.close()
    group._exit_stuck(why)
    ((text, blamed),) = reports
    assert blamed is host and "\n" not in text and left == [STUCK_EXIT]


def test_an_abort_never_waits_for_the_communicator_that_it_ends(ranks, monkeypatch):
    two = ranks(2, StuckGroup)
    held = threading.Event()
    as_built = two.groups[0]._comm.abort
    monkeypatch.setattr(two.groups[0]._comm, "abort", lambda: (held.wait(20), as_built()))
    two.groups[0].abort()
    two.groups[0].abort()
    assert two.groups[0].aborted and not two.groups[0]._ended.is_set()
    held.set()
    assert two.groups[0]._ended.wait(20)


def test_a_generation_ends_the_communicator_of_the_last_one_before_it_makes_its_own(ranks):
    first, second = nccl.CommunicatorHolder(), nccl.CommunicatorHolder()
    old = ranks(2, StuckGroup)
    for group, holder in zip(old.groups, (first, second), strict=True):
        group._holder, holder.group = holder, group
    open_then: list[bool] = []

    class Next(StuckGroup):
        def _open(self, store):
            open_then.append(any(g._comm is not None for g in old.groups if g.rank == self.rank))
            return super()._open(store)

        def __init__(self, assignment, *args):
            super().__init__(assignment, *args, holder=(first, second)[assignment.rank])

    new = ranks(2, Next)
    assert open_then == [False, False]
    assert new.each(lambda g: g.allreduce(torch.ones(1)).item()) == [2.0, 2.0]


def test_an_aborted_communicator_has_ended_before_its_rank_meets_the_others(monkeypatch):
    """Its kernels may run for long yet, and members that have met wait for each other within a limit."""
    holder, events = nccl.CommunicatorHolder(), []
    last, group = (StuckGroup(Assignment(g, 0, ("a/0/1", "b/0/1"), "127.0.0.1:9"), "job", "127.0.0.1", "key",
                              holder=holder) for g in (1, 2))
    holder.group, last.aborted = last, True
    monkeypatch.setattr(last, "end", lambda: events.append("end"))

    def meet():
        events.append("meet")
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(group, "_meet", meet)
    for was_aborted in (True, False):
        last.aborted = was_aborted
        with pytest.raises(ConnectionRefusedError):
            group._connect()
    assert events == ["end", "meet", "meet"] and holder.group is last
    last._stream.close()
    group._stream.close()


def values(rank: int) -> list[torch.Tensor]:
    return [torch.full((n,), float(n if rank < 2 else 0)) for n in (5000, 3, 700, 20_000)]


def test_messages_of_a_hand_over_cannot_wait_for_each_other_in_a_circle(ranks, monkeypatch):
    """Each message occupies the one stream of its rank until the peer takes it."""
    monkeypatch.setattr(handover, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(handover, "DIRECT_BYTES", 1 << 10)

    def work(group):
        tensors = values(group.rank)
        handover.hand_over(group, tensors, [True] * 4, [0, 1], [2, 3], 0)
        return all(torch.equal(a, b) for a, b in zip(tensors, values(0), strict=True))

    assert ranks(4, StuckGroup).each(work) == [True] * 4


def test_a_hand_over_whose_sender_dies_ends_with_the_abort_and_writes_nothing_afterwards(ranks, monkeypatch):
    monkeypatch.setattr(handover, "CHUNK_BYTES", 1 << 12)
    three = ranks(3, StuckGroup)

    def work(group):
        tensors = values(2)
        if group.rank == 1:
            group._cut()  # and sends nothing
            return None
        threading.Timer(0.2, group.abort).start()
        with pytest.raises(CommBroken):
            handover.hand_over(group, tensors, [True] * 4, [0, 1], [2], 0)
        return group._ended.is_set()

    assert three.each(work) == [True, None, True]


def test_a_process_whose_host_has_another_address_by_now_leaves_since_nccl_would_stay_at_the_old_one(
        monkeypatch: pytest.MonkeyPatch):
    left: list[str] = []

    def leave(_group: nccl.NcclGroup, why: str) -> None:
        left.append(why)
        raise ConnectionAbortedError(why)

    monkeypatch.setattr(nccl.NcclGroup, "_exit_stuck", leave)
    holder = nccl.CommunicatorHolder()
    for address in ("127.0.0.8", "127.0.0.8", "127.0.0.9"):
        group = StuckGroup(Assignment(1, 0, ("a/0/1", "b/0/1"), "127.0.0.1:9"), "job", address, "key", holder=holder)
        monkeypatch.setattr(group, "_meet", lambda: (_ for _ in ()).throw(ConnectionRefusedError("nobody is there")))
        with pytest.raises((ConnectionAbortedError, ConnectionRefusedError)):
            group._connect()
    assert left == ["this host is at 127.0.0.9 now, but NCCL stays at 127.0.0.8"]


def test_an_abort_while_the_communicator_comes_to_be_ends_the_formation():
    store, address = open_store("127.0.0.1", "key")
    opened = threading.Event()

    class Lonely(StuckGroup):
        def _meet(self):
            self._store = self._dial("127.0.0.1", store.port)
            return self._store

        def _open(self, given):
            opened.set()
            return super()._open(given)

    group = Lonely(Assignment(1, 0, ("a/0/1", "b/0/1"), address), "job", "127.0.0.1", "key")
    result: list[Exception] = []

    def form() -> None:
        try:
            group.form()
        except CommBroken as error:
            result.append(error)

    thread = threading.Thread(target=form)
    thread.start()
    assert opened.wait(20)
    group.abort()
    thread.join(20)
    assert [type(e) for e in result] == [CommBroken]


@pytest.mark.parametrize(("asked", "local_size", "devices", "chosen"), [
    ("auto", 1, 0, "gloo"),
    ("auto", 1, 1, "nccl"),
    ("auto", 4, 4, "nccl"),
    ("auto", 2, 1, "gloo"),  # one for both, or one for each: nobody can say
    ("nccl", 2, 1, "nccl"),
    ("gloo", 1, 8, "gloo"),
])
def test_nccl_is_taken_where_each_local_rank_has_a_device_and_where_it_is_asked_for(asked, local_size, devices, chosen):
    assert choose_backend(asked, local_size, devices) == chosen


@pytest.mark.parametrize("asked", ["nccl", "mpi", ""])
def test_a_backend_that_cannot_be_is_refused_with_the_variable_and_the_choices(asked):
    with pytest.raises(UsageError, match="SPOTFLEET_BACKEND") as refusal:
        make_group(Assignment(1, 0, ("a/0/1",), ""), "job", "127.0.0.1", environ={"SPOTFLEET_BACKEND": asked})
    assert "auto" in refusal.value.hint and "gloo" in refusal.value.hint


@pytest.mark.parametrize(("backends", "units", "problem"), [
    (["gloo", "nccl", "gloo"], ["", "GPU-1", ""], "gloo: rank 0, nccl: rank 1 first"),
    (["nccl", "nccl", "nccl"], ["GPU-1", "GPU-2", "GPU-1"], "ranks 0 and 2 share the device GPU-1"),
])
def test_ranks_that_can_never_form_a_generation_are_refused(backends, units, problem):
    with pytest.raises(UsageError, match=problem):
        check_alike(backends, units)


def test_a_refusal_while_a_generation_forms_reaches_every_rank_as_what_it_is(ranks):
    class Mixed(StuckGroup):
        def __init__(self, assignment, *args):
            super().__init__(assignment, *args)
            self.backend = "nccl" if assignment.rank else "gloo"

    errors = ranks(2, Mixed, form=False).each(lambda g: g.form())
    assert [type(e) for e in errors] == [UsageError, UsageError]


def test_the_interface_is_the_one_that_carries_the_advertised_address():
    assert [interface_of(a) for a in ("127.0.0.1", "127.83.2.9")] == ["lo", "lo"]
    assert [interface_of(a) for a in ("203.0.113.77", "a-name", "")] == [""] * 3


def test_nccl_is_told_the_interface_and_a_users_own_choice_stays():
    theirs = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_ENABLE_MONITORING": "1",
              "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60"}
    ours, chosen = variables({}, "127.0.0.1"), variables(theirs, "127.0.0.1")
    assert (ours["NCCL_SOCKET_IFNAME"], ours["NCCL_NVLS_ENABLE"]) == ("=lo", "0")
    assert set(chosen) & set(theirs) == {"TORCH_NCCL_ENABLE_MONITORING"}
    assert chosen["TORCH_NCCL_ENABLE_MONITORING"] == "0"  # it would end a process that ours keeps
    assert connect_limit_s(theirs) == 60.0 and connect_limit_s({}) == CONNECT_LIMIT_S


def test_what_forming_sets_in_the_environment_is_gone_afterwards():
    """A user's own NCCL group would otherwise run without torch's guards."""
    before = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    environ = dict(before)
    loan = EnvironmentLoan(environ)
    with loan.taken("127.0.0.1"):
        with loan.taken("127.0.0.1"):  # an abandoned thread may still be inside
            pass
        assert (environ["TORCH_NCCL_ENABLE_MONITORING"], environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("0", "0")
        assert environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
        environ["NCCL_NVLS_ENABLE"] = "2"  # the user's script goes on meanwhile
    assert environ == before | {"NCCL_NVLS_ENABLE": "2"}


def test_a_group_forms_with_the_variables_and_leaves_none(ranks):
    seen: list[str | None] = []

    class Seeing(StuckGroup):
        def _warm_up(self, made):
            seen.append(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT"))
            super()._warm_up(made)

    before = dict(os.environ)
    ranks(2, Seeing)
    assert seen == [str(CONNECT_LIMIT_S)] * 2 and dict(os.environ) == before


def test_a_group_is_made_without_torchs_detailed_debugging_which_stays_the_users():
    """With DETAIL torch's watchdog ends the process on an error, whatever the variables say."""
    before = dist.get_debug_level()
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        with no_detail():
            assert dist.get_debug_level() == dist.DebugLevel.INFO
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize(("version", "remarked"), [
    ("2.10.1", True), ("2.11.0+cu130", False), ("2.13.0+cpu", False), ("2.14.0.dev20261101", True), ("3.0", True),
    ("main", False)])
def test_a_version_of_torch_that_nobody_has_tested_is_remarked_and_not_refused(version, remarked):
    assert bool(untested(version)) is remarked

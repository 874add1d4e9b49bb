"""The line to the agent, against an agent that comes and goes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading

import pytest

from spotfleet.protocol.messages import Assignment, Stage, WorkerOrders, WorkerReport, dump, load
from spotfleet.worker.control import AgentLine
from spotfleet.worker.member import Member


class Agent:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(1)
        self._listener.settimeout(10)
        self.sock: socket.socket | None = None

    def accept(self) -> None:
        self.sock, _ = self._listener.accept()
        self.sock.settimeout(10)
        self.lines = self.sock.makefile()

    def hear(self) -> WorkerReport:
        return load(WorkerReport, self.lines.readline())

    def say(self, text: str) -> None:
        self.sock.sendall(text.encode() + b"\n")

    def close(self) -> None:
        for s in (self._listener, self.sock):
            if s is not None:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
                s.close()


@pytest.fixture
def line(tmp_path):
    path = str(tmp_path / "a.sock")
    agent, control = Agent(path), AgentLine(path, WorkerReport("h/0/1", "job"))
    control.start()
    agent.accept()
    yield agent, control, path
    agent.close()
    control.close()


@pytest.fixture
def thousands_of_files():
    """Open as long as the test runs: what is opened next has a descriptor beyond 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2000:
        pytest.skip("this process may have no more than 1023 files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2000), before[1]))
    with contextlib.ExitStack() as files:
        while files.enter_context(open(os.devnull)).fileno() < 1023:
            continue
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_script_may_have_thousands_of_files_open(thousands_of_files, line):
    agent, control, _ = line
    assert min(control.descriptors()) > 1023 and agent.hear().stage is Stage.STARTING
    control.update(stage=Stage.READY)
    assert agent.hear().stage is Stage.READY
    agent.say(dump(WorkerOrders(stop=True)))
    assert obeyed(control, lambda o: o.stop)


def test_it_connects_once_a_descriptor_is_free(tmp_path, monkeypatch):
    agent, make = Agent(str(tmp_path / "a.sock")), socket.socket
    control = AgentLine(str(tmp_path / "a.sock"), WorkerReport("h/0/1", "job"))
    refusals = [OSError(errno.EMFILE, "Too many open files")]

    def scarce(*args, **more) -> socket.socket:
        if refusals and threading.current_thread().name == "spotfleet-control":
            raise refusals.pop()
        return make(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", scarce)
        control.start()
        agent.accept()
    assert agent.hear().worker == "h/0/1" and not refusals
    agent.close()
    control.close()


def obeyed(control: AgentLine, wanted) -> bool:
    with control.cv:
        return control.cv.wait_for(lambda: wanted(control.orders), 10)


def test_it_reports_at_once_and_on_each_change_and_again_unasked(line):
    agent, control, _ = line
    first = agent.hear()
    control.update(stage=Stage.READY)
    second = agent.hear()
    assert (first.stage, second.stage, agent.hear().stage) == (Stage.STARTING, Stage.READY, Stage.READY)


def test_orders_replace_each_other_and_nonsense_is_ignored(line, capfd):
    agent, control, _ = line
    agent.say("{no json")
    agent.say('{"founded": "yes"}')
    agent.say(dump(WorkerOrders(assignment=Assignment(3, 1, ("a", "b"), "s:1"))))
    assert obeyed(control, lambda o: o.assignment is not None and o.assignment.generation == 3)


def test_orders_are_told_to_the_runtime_under_the_lock(line):
    agent, control, _ = line
    heard = threading.Event()
    control.on_orders = lambda orders: heard.set() if orders.stop else None
    agent.say(dump(WorkerOrders(stop=True)))
    assert heard.wait(10)


def test_an_agent_that_restarts_finds_the_worker_with_its_newest_report(line):
    agent, control, path = line
    agent.say(dump(WorkerOrders(founded=True)))
    assert obeyed(control, lambda o: o.founded)
    agent.close()
    control.update(stage=Stage.READY, failed=4)
    os.unlink(path)
    again = Agent(path)
    again.accept()
    report = again.hear()
    assert (report.stage, report.failed) == (Stage.READY, 4)
    assert control.orders.founded, "the newest orders stay in force while the agent is away"
    again.close()


def test_the_last_word_is_surely_sent(line):
    agent, control, _ = line
    control.update(error="it broke")
    assert control.flush(10)
    reports = [agent.hear() for _ in range(2)]
    assert reports[-1].error == "it broke" or reports[0].error == "it broke"


def test_a_member_that_ends_sends_its_newest_numbers(tmp_path):
    agent, version = Agent(str(tmp_path / "a.sock")), 7
    member = Member(lambda assignment, address: None, {"SPOTFLEET_SOCKET": str(tmp_path / "a.sock")})
    member.control.live = lambda: {"version": version}
    member.control.start()
    agent.accept()
    assert agent.hear().version == 7
    member.initialized, version = True, 8
    member.shutdown()
    assert [load(WorkerReport, line).version for line in agent.lines][-1:] == [8]
    agent.close()


def test_numbers_that_change_each_step_are_read_when_a_report_is_made(line):
    agent, control, _ = line
    control.live = lambda: {"version": 7}
    control.update(stage=Stage.READY)
    assert [agent.hear() for _ in range(2)][-1].version == 7

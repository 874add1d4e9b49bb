"""Worker and agent: reports up, orders down, files both ways. The scripts here speak the protocol by hand."""

from __future__ import annotations

import hashlib
import socket
import time
from dataclasses import replace

import pytest

from spotfleet.protocol.messages import Assignment, Checkpoint, Exit, WorkerOrders, WorkerReport, dump
from spotfleet.protocol.messages import Stage as Progress
from tests.support.agent.agent_stage import HOST, Stage, eventually

pytestmark = pytest.mark.processes

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"
TALK = """
import hashlib, json, os, socket, sys, time
s = socket.socket(socket.AF_UNIX); s.connect(os.environ["SPOTFLEET_SOCKET"]); lines = s.makefile("r")
WORK = os.environ["SPOTFLEET_WORK"]
def say(**report):
    report = {"worker": os.environ["SPOTFLEET_WORKER"], "job": os.environ["SPOTFLEET_JOB"], **report}
    s.sendall(json.dumps(report).encode() + b"\\n")
def checkpoint(version, generation=1):
    path = f"{WORK}/ckpt-{version}.pt"
    data = f"state {version}".encode() * 1000
    open(path, "wb").write(data)
    return {"version": version, "digest": hashlib.sha256(data).hexdigest(), "bytes": len(data),
            "generation": generation, "path": path}
"""
ASSIGNMENT = Assignment(1, 0, (FIRST,), "127.0.0.1:1")


def test_a_report_reaches_the_dispatcher_within_moments(stage: Stage, record_property):
    stage.boot()
    stage.job(TALK + "say()\nfor line in lines:\n    if json.loads(line)['stop']: break\n"
                     "say(stage='ready', store=repr(time.monotonic()))\nlines.readline()\ntime.sleep(1000)\n")
    stage.order(FIRST)
    stage.dispatcher.wait_worker(FIRST, lambda w: w.pid)
    begun = time.monotonic()
    stage.order(FIRST, orders=WorkerOrders(stop=True))
    ready = stage.dispatcher.wait_worker(FIRST, lambda w: w.report.stage is Progress.READY)
    took_s = stage.dispatcher.reported_at - float(ready.report.store)
    record_property("report_s", round(took_s, 4))
    print(f"report: {took_s:.4f} s; orders down and report up: {stage.dispatcher.reported_at - begun:.4f} s")


def test_orders_repeat_each_second(stage: Stage):
    stage.boot()
    ended = stage.run(TALK + "say()\nfor n in range(3): print(json.loads(lines.readline())['checkpoint_every_s'])\n")
    assert ended.exit == Exit(0, done=True) and stage.log() == "60.0\n60.0\n60.0\n"


def test_the_last_report_before_the_end_is_not_lost(stage: Stage):
    stage.boot()
    ended = stage.run(TALK + "say(); lines.readline()\nwritten = checkpoint(99, generation=4)\n"
                             "say(stage='finished', version=99, generation=4, checkpoint=written)\n")
    assert ended.exit == Exit(0, done=True)
    assert replace(ended.report, checkpoint=None) == WorkerReport(FIRST, "job", Progress.FINISHED, version=99,
                                                                  generation=4)
    assert stage.dispatcher.checkpoints[99] == (4, b"state 99" * 1000)


def test_a_process_that_reports_before_its_pid_is_known_is_received(stage: Stage):
    stage.patch = """
import asyncio
from spotfleet.agent.processes.zygote_client import ZygoteClient
started = ZygoteClient._started
ZygoteClient._started = lambda *given: asyncio.get_running_loop().call_later(1.0, started, *given)"""
    stage.boot()
    stage.job(TALK + "say(stage='ready')\nassert lines.readline()\ntime.sleep(1000)\n")
    stage.order(FIRST)
    stage.dispatcher.wait_worker(FIRST, lambda w: w.report.stage is Progress.READY or w.exit)
    assert stage.dispatcher.worker(FIRST).exit is None


def test_nobody_reports_in_the_name_of_a_worker_but_its_own_process(stage: Stage):
    stage.boot()
    stage.job(TALK + "say(stage='init'); lines.readline()\nprint(os.environ['SPOTFLEET_SOCKET'])\ntime.sleep(1000)\n")
    stage.order(FIRST)
    eventually(lambda: stage.log())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(stage.log().strip())
        stranger.sendall(dump(WorkerReport(FIRST, "job", Progress.FINISHED)).encode() + b"\n")
        stranger.settimeout(30)
        assert stranger.recv(100) == b""
    assert stage.dispatcher.worker(FIRST).report.stage is Progress.INIT


def test_the_workers_of_a_command_report_too(stage: Stage):
    stage.boot()
    script = (TALK + "say(version=5); lines.readline()\n").replace("'", '"')
    ended = stage.run(run=f"true; python -c '{script}'; exit 4")
    assert (ended.exit, ended.report.version) == (Exit(4), 5)


def test_a_worker_that_must_restore_gets_file_and_assignment_together(stage: Stage):
    stage.boot()
    data = b"the state" * 1000
    kept = Checkpoint(7, hashlib.sha256(data).hexdigest(), len(data), 3)
    stage.job(TALK + "say()\nfor line in lines:\n    o = json.loads(line)\n    if o['founded']: print('waits')\n"
                     "    assert bool(o['assignment']) == bool(o['restore'])\n    if o['restore']: break\n"
                     "print(open(o['restore']['path'], 'rb').read() == b'the state' * 1000)\n")
    stage.order(FIRST, orders=WorkerOrders(ASSIGNMENT, founded=True, restore=kept))
    eventually(lambda: "waits\nwaits\n" in stage.log())
    assert "fetching checkpoint 7" in stage.dispatcher.wait(lambda r: "fetching" in r.why).why
    stage.dispatcher.checkpoints[7] = (3, data[:-1])  # damaged: never given to the worker
    eventually(lambda: "has digest" in stage.agent_log.read_text())
    stage.dispatcher.checkpoints[7] = (3, data)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(0, done=True)
    assert stage.log().endswith("waits\nTrue\n")


def test_the_newest_checkpoint_is_uploaded_and_those_overtaken_are_not(stage: Stage):
    stage.boot()
    stage.dispatcher.hold_checkpoints.clear()
    stage.job(TALK + "say(checkpoint=checkpoint(1)); lines.readline()\n"
                     "while not os.path.exists('go'): time.sleep(0.01)\n"
                     "for v in 2, 3, 4:\n    say(checkpoint=checkpoint(v)); os.unlink(f'{WORK}/ckpt-{v - 1}.pt')\n"
                     "    time.sleep(0.1)\nprint('written')\n")
    stage.order(FIRST)
    eventually(lambda: stage.dispatcher.uploads)  # the first is on its way
    (stage.home / "jobs/job/source/go").touch()
    eventually(lambda: "written" in stage.log())
    stage.dispatcher.hold_checkpoints.set()
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(0, done=True)
    assert stage.dispatcher.uploads == [1, 4] and stage.dispatcher.checkpoints[4] == (1, b"state 4" * 1000)
    stage.order()
    stage.dispatcher.wait(lambda r: not r.workers)
    assert not list(stage.home.rglob("*.pt"))


def test_a_refused_checkpoint_is_dropped(stage: Stage):
    stage.boot()
    stage.dispatcher.refuse_checkpoints = True
    ended = stage.run(TALK + "say(checkpoint=checkpoint(1)); lines.readline()\n")
    assert ended.exit == Exit(0, done=True) and stage.dispatcher.uploads == [1]


def test_the_output_folder_arrives_before_the_end_is_reported(stage: Stage):
    stage.boot()
    stage.run("import os\nopen(os.environ['SPOTFLEET_OUTPUT'] + '/model.txt', 'w').write('weights')\n")
    assert stage.dispatcher.output(FIRST) == {"model.txt": b"weights"}


def test_an_empty_output_folder_is_not_sent(stage: Stage):
    stage.boot()
    stage.run("print('nothing')")
    assert stage.dispatcher.output_bytes == 0

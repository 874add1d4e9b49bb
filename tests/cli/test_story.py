"""`spotfleet events` for people: one sentence for each kind of event."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import get_args

import pytest

from spotfleet.api import reports
from spotfleet.cli import event_text
from spotfleet.fleet.domain import events as e
from spotfleet.model import (
    BillingRules,
    BootStages,
    CloudState,
    JobState,
    Market,
    Nodes,
    Offer,
    PolicySpec,
    Rates,
    Role,
    Run,
)

AT = 1795173450.5  # 2026-11-20 11:17:30 UTC
OFFER = Offer("local", "local", "local-a", "cpu.small", Market.SPOT, 1, 29_300, 85_000)
WHY = "2 of 2 hosts missing; $0.0293/h in local/local-a/cpu.small/spot"
NODES = Nodes(1, 2, 3)
TWO, ONE = ("u-1/0/12", "u-3/0/13"), ("u-1/0/12",)


def ended(**more) -> e.HostListed:
    return e.HostListed(AT, "u-0", "i-1", CloudState.TERMINATED, (Run(AT - 92.0, AT),), why="ended by its user", **more)


SAID = [
    (e.FleetCreated(AT, "u", "local", NODES, BillingRules()),
     "u           fleet on local taken over by its dispatcher: 1..3 hosts, target 2"),
    (e.NodesChanged(AT, NODES, "asked by `spotfleet up`"),
     "fleet       is to have 1..3 hosts, target 2: asked by `spotfleet up`"),
    (e.LaunchIntended(AT, "u-0", Role.WORKER, OFFER, WHY), f"u-0         host is launched: {WHY}"),
    (e.LaunchIntended(AT, "u-d-0", Role.DISPATCHER, OFFER, WHY), f"u-d-0       dispatcher is launched: {WHY}"),
    (e.LaunchRefused(AT, "u-0", "pool", "no capacity"), "u-0         refused: no capacity"),
    (e.LaunchRefused(AT, "u-0", "region", "quota"), "u-0         refused (in the whole region): quota"),
    (e.HostPlaced(AT, "u-0", OFFER), f"u-0         the provider chose {OFFER.pool}"),
    (e.HostListed(AT, "u-0", "i-1", CloudState.PENDING, ()), "u-0         is starting as i-1"),
    (e.HostListed(AT, "u-0", "i-1", CloudState.RUNNING, (Run(AT),), "127.1.2.3", why="launched"),
     "u-0         runs at 127.1.2.3 as i-1: launched"),
    (e.HostListed(AT, "u-0", "i-1", CloudState.RUNNING, (Run(AT),), missing=True),
     "u-0         is missing from the provider's list; it was running"),
    (e.HostListed(AT, "u-0", "i-1", CloudState.STOPPED, (Run(AT - 9, AT, True),), why="no notice"),
     "u-0         is stopped after 9s (interrupted): no notice"),
    (ended(), "u-0         has ended after 1m32s: ended by its user"),
    (ended(missing=True),
     "u-0         has ended after 1m32s: ended by its user; the provider does not list it any more"),
    (e.HostJoined(AT, "u-0", "26462b69daf6"), "u-0         is up: its agent has joined"),
    (e.HostJoined(AT, "u-0", "26462b69daf6", BootStages(195.4, 41.0, 22.5, 110.0, 18.0)),
     "u-0         is up: its agent has joined, 3m15s after its launch (machine 41s, system 22s, packages 1m50s, agent "
     "18s)"),
    (e.HostJoined(AT, "u-0", "26462b69daf6", BootStages(7.0)),
     "u-0         is up: its agent has joined, 7s after its launch"),
    (e.HostJoined(AT, "u-d-0", "https://127.1.2.3:99"), "u-d-0       answers at https://127.1.2.3:99"),
    (e.HostSilent(AT, "u-0"), "u-0         is silent: its connection is lost"),
    (e.HostNoticed(AT, "u-0", 119.6, "terminate"),
     "u-0         got an interruption notice: it will be terminated in 120 s"),
    (e.HostNoticed(AT, "u-0", 119.6, "stop"), "u-0         got an interruption notice: it will be stopped in 120 s"),
    (e.HostNoticed(AT, "u-0", 0.0, "terminate", "rebalance"),
     "u-0         got a hint from the provider (rebalance): checkpoints are written, training goes on here"),
    (e.HostDraining(AT, "u-0", "asked by `spotfleet drain`"), "u-0         is to leave: asked by `spotfleet drain`"),
    (e.TerminateIntended(AT, "u-0", "drained"), "u-0         is being terminated: drained"),
    (e.HostFailed(AT, "u-0", "slot 1: GPU 0:1D.0 had Xid 79", True, "nothing to do: another one is launched"),
     "u-0         failed before it joined: slot 1: GPU 0:1D.0 had Xid 79 -- nothing to do: another one is launched"),
    (e.TokenRevoked(AT, "u-0", "its key leaked"), "u-0         is trusted no more: its key leaked"),
    (e.ClockSetBack(AT, 3600.0), "clock       is set back by 1h00m; all that waits goes on by the new time"),
    (e.TakenOver(AT, "u-d-1", False, "2 hosts go on"), "fleet       is taken over by u-d-1: 2 hosts go on"),
    (e.TargetChanged(AT, "/mnt/shared", "cannot be written to"), "target      /mnt/shared: cannot be written to"),
    (e.TargetChanged(AT, "/mnt/shared", ""), "target      /mnt/shared can be written to again"),
    (e.PriceChanged(AT, "local/local-a/cpu.small/spot", 29_300, 85_000),
     "price       local/local-a/cpu.small/spot costs $0.0293/h, on demand $0.0850/h"),
    (e.RatesStamped(AT, "aws", "us-east-1", Rates(80_000, 5_000, 20_000)),
     "price       beside machines, aws us-east-1 asks $0.0800 for a GiB of disk a month, $0.0050/h for an address, "
     "$0.0200 for a GiB to another zone"),
    (e.PolicyDecided(AT, 3, 1, "1 of 4 is always on demand"),
     "policy      3 spot and 1 on-demand hosts: 1 of 4 is always on demand"),
    (e.DemandDecided(AT, 2, "2 tasks or actors wait for {'CPU': 1}"),
     "demand      2 hosts: 2 tasks or actors wait for {'CPU': 1}"),
    (e.DemandDecided(AT, 1, "1 host with Ray's work", "gpu"),
     "demand      1 host of group gpu: 1 host with Ray's work"),
    (e.DemandUnmet(AT, {"{'GPU': 8}": "1 task or actor waits for {'GPU': 8}, which fits no host"}),
     "demand      1 task or actor waits for {'GPU': 8}, which fits no host"),
    (e.DemandUnmet(AT), "demand      all that waits in Ray gets hosts"),
    (e.PolicyChanged(AT, PolicySpec("auto", 1, 216_000.0, 0.0, 0, 250_000_000, 4_500_000), "asked by `spotfleet up`"),
     "policy      is now auto, 1 on demand at least, deadline 2d12h, max_cost $250.00, max_hourly_cost $4.5000/h: "
     "asked by `spotfleet up`"),
    (e.BudgetReached(AT, "max_cost", 80, 8_000_000, 10_000_000, "$8.00 of $10.00 are spent"),
     "budget      80 % of max_cost: $8.00 of $10.00 are spent"),
    (e.JobSubmitted(AT, "d-8", "d", "t.py --steps 9", 1, 2), "d-8         submitted for 1..2 workers: t.py --steps 9"),
    (e.JobSubmitted(AT, "d-8", "d", "\necho a\necho b\n", 1, 1), "d-8         submitted for 1 worker: echo a ..."),
    (e.JobChanged(AT, "d-8", JobState.QUEUED, "needs 1 host"), "d-8         is queued: needs 1 host"),
    (e.JobChanged(AT, "d-8", JobState.FAILED, "it raised", 36), "d-8         has failed at step 36: it raised"),
    (e.GenerationFormed(AT, "d-8", 2, TWO, "join", "u-3/0/13 joined", 36),
     "d-8         generation 2 (join) from step 36: 2 workers on u-1, u-3; u-3/0/13 joined"),
    (e.GenerationFormed(AT, "d-8", 3, ONE, "notice", "u-3/0/13 leaves", 37),
     "d-8         generation 3 (notice) from step 37: 1 worker on u-1; u-3/0/13 leaves"),
    (e.GenerationFormed(AT, "d-8", 2, ONE, "start", "1 worker is ready", 0),
     "d-8         generation 2 (start): 1 worker on u-1; 1 worker is ready"),
    (e.JobResized(AT, "d-8", 2, 2, 3, "scale-lr", "learning rates are 3/2 of those for 2 workers"),
     "d-8         2 -> 3 workers: learning rates are 3/2 of those for 2 workers"),
    (e.JobResumed(AT, "d-8", 1, 1, 0, 0.0), "d-8         generation 1 trains: step 1 is done"),
    (e.JobResumed(AT, "d-8", 1, 1, 0, 0.0, first_steps={"u-0": 240.0}),
     "d-8         generation 1 trains: step 1 is done; the first step of u-0 came 4m00s after its launch"),
    (e.JobResumed(AT, "d-8", 1, 1, 0, 0.0, first_steps={f"u-{n}": 9.0 for n in range(6)}),
     "d-8         generation 1 trains: step 1 is done" + "".join(
         f"; the first step of u-{n} came 9s after its launch" for n in range(5)) + "; and those of 1 more host"),
    (e.JobResumed(AT, "d-8", 2, 37, 1, 0.1271),
     "d-8         generation 2 trains: step 37 is done, 1 step repeated, paused for 127 ms"),
    (e.JobProgress(AT, "d-8", 96, 0.1043), "d-8         at step 96, 104.3 ms per step"),
    (e.StepExplained(AT, "d-8", 2, 0.1, 0.04, 0.0, 0.06, 0.02, ("u-1", "u-3"), "", "a step takes 0.100 s: 0.040 s ..."),
     "d-8         generation 2: a step takes 0.100 s: 0.040 s ..."),
    (e.SetupFailed(AT, "d-8", "u-3", 2, "setup failed: line 4 (`false`) exited with code 1\nits last output:\n  no"),
     "d-8         on u-3, try 2: setup failed: line 4 (`false`) exited with code 1"),
    (e.CheckpointKept(AT, "d-8", 120, 5, "12439156f47e0e2d", 2529),
     "d-8         checkpoint of step 120 kept: 2.53 kB, sha256 12439156f47e"),
    (e.LogsCut(AT, "d-8", "u-1", 2 << 30),
     "d-8         the oldest output of u-1 is removed from now on: the logs of a job may take 2.15 GB"),
    (e.JobsPruned(AT, ("d-1", "d-2"), 48_000, ("d-2",)),
     "jobs        the files of d-1, d-2 are removed, 48 kB: `jobs --prune`; the outputs of d-2 had not been copied"),
    (e.CheckpointLost(AT, "d-8", 120, 5, "12439156f47e0e2d", "its file is missing"),
     "d-8         checkpoint of step 120 is set aside: its file is missing"),
    (e.ScriptsRan(AT, "d-8", ("u-0/0/1", "u-1/0/2"), AT - 60, "the script without hvd.init()"),
     "d-8         2 workers on u-0, u-1 run the script without hvd.init()"),
    (e.ScriptsRan(AT, "d-8", (), AT, "the script without hvd.init()"),
     "d-8         no worker runs the script or command any more"),
    (e.ScriptsRan(AT, "d-8", (), AT, "", known=True), "d-8         the workers train in hvd.elastic.run from now on"),
    (e.TrialHeld(AT, "d-8", "a1", "train_a1", 3, {"u-1": 10**6, "u-0": 500_000}),
     "d-8         trial train_a1 has 3 workers on u-0, u-1"),
    (e.TrialHeld(AT, "d-8", "a1", "train_a1", 0), "d-8         trial train_a1 has no worker any more"),
    (e.CheckpointInTime(AT, "d-8", 812, 790, 0.0, "version 812 was reached, 790 is kept: 22 steps will be repeated"),
     "d-8         all who held its state had to go: version 812 was reached, 790 is kept: 22 steps will be repeated"),
    (e.ResultsLost(AT, "d-8", "u-3", "output", 22_000_000, "the dispatcher's disk is full"),
     "d-8         22 MB of its output is lost with u-3: the dispatcher's disk is full"),
    (e.ResultsLost(AT, "d-8", "u-3", "log", 0, "", "/mnt/kept"),
     "d-8         a part of its log was not collected from u-3, and is in /mnt/kept"),
    (e.RanksDiverged(AT, "d-8", 30, 20, "state.epoch is 3 on rank 0, 4 on rank 1"),
     "d-8         the ranks' states differ at step 30, goes on from the checkpoint of step 20: "
     "state.epoch is 3 on rank 0, 4 on rank 1"),
    (e.HistoryLost(AT, "ledger.db.corrupt-1", "it is no database"),
     "records     begun anew, the old one is kept as ledger.db.corrupt-1: it is no database"),
    (e.FileDamaged(AT, "jobs/d-8/job.json", "job.json.damaged-1", "it is no JSON", "agents are asked for the job"),
     "file        jobs/d-8/job.json: it is no JSON; it is kept as job.json.damaged-1: agents are asked for the job"),
    (e.DownDecided(AT, "asked by `spotfleet down`", False), "fleet       goes down: asked by `spotfleet down`"),
    (e.DownDecided(AT, "idle", True, limited=True),
     "fleet       goes down: idle; hosts get little time to send results"),
    (e.DownDecided(AT, "idle", True, discard=True),
     "fleet       goes down: idle; results that do not arrive are given up"),
    (e.FleetDown(AT, "idle for 6 s (autostop)"), "fleet       has no host any more: idle for 6 s (autostop)"),
]


@pytest.mark.parametrize(("event", "said"), SAID)
def test_each_event_is_one_sentence_about_somebody(event, said):
    assert event_text.line({"ledger": "dispatcher", "seq": 1, **e.event_to_json(event)}) == f"11:17:30  {said}"


def test_no_kind_of_event_is_without_a_sentence():
    assert {type(event) for event, _ in SAID} == set(get_args(e.Event))


def test_an_event_of_a_newer_dispatcher_is_shown_by_its_kind():
    rows = [{"seq": 1, "kind": "JobPraised", "at": AT, "job": "d-8", "stars": 5},
            {"seq": 2, **e.event_to_json(e.FleetDown(AT, "idle"))}, {"seq": 3, "kind": "Later", "at": AT}]
    client = SimpleNamespace(events=lambda after: rows[after:])
    found = reports.merged(reports.dispatcher_rows(client), [])
    assert [event_text.line(row, event_text.preemption(row, {})) for row in found] == [
        "11:17:30  d-8         JobPraised (a newer spotfleet describes it)",
        "11:17:30  fleet       has no host any more: idle",
        "11:17:30              Later (a newer spotfleet describes it)"]
    assert [row["seq"] for row in found] == [1, 2, 3] and found[0]["stars"] == 5
    with pytest.raises(ValueError, match="unknown event kind"):
        reports.dispatcher_events(client)


def test_the_laptops_own_ledger_speaks_of_the_provider_and_of_answers():
    down = {"ledger": "laptop", **e.event_to_json(e.FleetDown(AT, "asked by `down`"))}
    assert event_text.line(down).endswith("fleet       nothing of it is listed any more: asked by `down`")
    silent = {"ledger": "laptop", **e.event_to_json(e.HostSilent(AT, "u-d-0"))}
    assert event_text.line(silent).endswith("u-d-0       does not answer any more")


def test_workers_that_share_a_host_are_counted():
    formed = e.GenerationFormed(AT, "d-8", 1, ("u-1/0/1", "u-1/1/2", "u-2/0/3"), "start", "3 workers are ready")
    assert "3 workers on u-1 (2), u-2; 3 workers are ready" in event_text.line(e.event_to_json(formed))


def test_the_date_is_told_where_it_changes():
    rows = [{"at": AT}, {"at": AT + 1}, {"at": AT + 86400}]
    assert [day for _, day in event_text.days(rows)] == ["2026-11-20", "", "2026-11-21"]
    assert [day for _, day in event_text.days(rows[:1], "2026-11-20")] == [""]


@pytest.mark.parametrize(("why", "said"), [
    ("drained: got a notice", "preempted (drained in time)"),
    ("not drained within 30 s: got a notice", "preempted (not drained in time)"),
    ("the fleet goes down", "ended by its user"),
])
def test_a_host_that_left_because_of_a_notice_is_called_preempted(why, said):
    rows = [e.event_to_json(event) for event in (e.HostNoticed(AT, "u-0", 15.0, "terminate"),
                                                 e.TerminateIntended(AT, "u-0", why), ended())]
    preempted: Mapping[str, str] = {}
    for row in rows:
        preempted = event_text.preemption(row, preempted)
    assert event_text.line(rows[-1], preempted).endswith(f"has ended after 1m32s: {said}")


@pytest.mark.parametrize("notice", ["rebalance", ""])
def test_a_host_without_an_interruption_notice_is_not_called_preempted(notice):
    first = [e.HostNoticed(AT, "u-0", 0.0, "terminate", notice)] if notice else []
    preempted: Mapping[str, str] = {}
    for event in (*first, e.TerminateIntended(AT, "u-0", "drained: asked by `spotfleet drain`")):
        preempted = event_text.preemption(e.event_to_json(event), preempted)
    assert event_text.line(e.event_to_json(ended()), preempted).endswith("ended by its user")

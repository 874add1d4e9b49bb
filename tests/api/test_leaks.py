"""`spotfleet leaks`: what nothing accounts for is found and ended, and nothing else is touched."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spotfleet.api.account import leaks
from spotfleet.api.account.leaks import FRESH_S, KnownFleet, Ownership, Suspect, judge
from spotfleet.api.home import Home
from spotfleet.model import CloudHost, CloudState, Market, Need, Offer, Role, Run
from spotfleet.names import is_life, life, on_several
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local.inprocess import InProcessProvider
from tests.support.cli.cli_cloud import FakeDispatcher

NOT_ASKED = ("note: aws was not asked: aws us-east-1: no valid credentials: Unable to locate credentials; to ask it: "
             "`aws sso login` or `aws configure`, then `aws sts get-caller-identity`\n"
             "note: gcp was not asked: gcp: no credentials; to ask it: gcloud auth application-default login\n")
NOW = 1_800_000_000.0
OLD = NOW - 7200.0
SPOT = Offer("local", "local", "a", "gpu.small", Market.SPOT, 1, 970_000, 3_060_000)
HOST = CloudHost("ghost-0", "i-0", "ghost", Role.WORKER, SPOT, CloudState.RUNNING, (Run(OLD),))
DISPATCHER = replace(HOST, request_id="ghost-d-0", provider_id="i-d", role=Role.DISPATCHER)


def ended(line: CloudHost, at: float) -> CloudHost:
    return replace(line, state=CloudState.TERMINATED, runs=(Run(OLD, at),))


def verdicts(lines, known=None) -> list[tuple[str, Ownership, str]]:
    return [(s.machine, s.verdict, s.why) for s in judge(lines, known or {}, NOW)]


def test_a_machine_of_a_fleet_that_nobody_knows_is_a_leak():
    assert judge([HOST], {}, NOW) == [Suspect(
        "ghost-0", "ghost", "local", Role.WORKER, SPOT.pool, OLD, 970_000, Ownership.LEAK,
        "fleet ghost is not known here, and no dispatcher of it is listed; "
        "it may still train, since nobody knows for how long it has had no dispatcher", "i-0")]


def test_a_machine_of_a_fleet_that_is_down_is_a_leak_also_when_it_is_stopped():
    stopped = replace(HOST, state=CloudState.STOPPED)
    assert verdicts([stopped], {"ghost": KnownFleet(down_at=NOW - 3600)}) == [
        ("ghost-0", Ownership.LEAK, "fleet ghost is down since 07:00:00 UTC")]


def test_a_fleet_of_another_machine_whose_dispatcher_lives_is_not_ours():
    why = "fleet ghost of another machine: its dispatcher lives"
    assert verdicts([DISPATCHER, HOST]) == [
        ("ghost-d-0", Ownership.ELSEWHERE, why), ("ghost-0", Ownership.ELSEWHERE, why)]


def test_the_dispatcher_of_our_own_fleet_that_is_down_protects_nobody():
    down = KnownFleet(down_at=NOW - 3600, machines=frozenset({("ghost-d-0", "i-d")}))
    assert [(m, v) for m, v, _ in verdicts([DISPATCHER, HOST], {"ghost": down})] == [
        ("ghost-d-0", Ownership.LEAK), ("ghost-0", Ownership.LEAK)]
    another = replace(DISPATCHER, provider_id="i-other")  # same name, made elsewhere
    assert {v for _, v, _ in verdicts([another, HOST], {"ghost": down})} == {Ownership.ELSEWHERE}


def test_a_worker_host_that_its_living_dispatcher_does_not_know_is_a_leak():
    alive = KnownFleet(hosts=frozenset({"ghost-1"}))
    assert verdicts([DISPATCHER, HOST, replace(HOST, request_id="ghost-1")], {"ghost": alive}) == [
        ("ghost-0", Ownership.LEAK, "its dispatcher lives and does not know it")]
    assert verdicts([DISPATCHER, HOST], {"ghost": KnownFleet(hosts=None)}) == []  # it does not answer: nobody can tell


@pytest.mark.parametrize("line, known, why", [
    (replace(HOST, runs=(Run(NOW - FRESH_S + 1),)), None, "it began 299 s ago"),
    (replace(HOST, state=CloudState.PENDING, runs=()), None, "it is just starting"),
    (replace(HOST, state=CloudState.PENDING), None, "it is just starting"),
    (HOST, KnownFleet(down_at=NOW - 60), "fleet ghost is down since 07:59:00 UTC, which the listing may not show yet"),
])
def test_what_is_young_or_has_just_changed_is_left_alone(line, known, why):
    assert verdicts([line], {"ghost": known} if known else {}) == [("ghost-0", Ownership.FRESH, why)]


def test_a_stopped_machine_is_not_about_to_start():
    stopped = replace(HOST, state=CloudState.STOPPED, runs=())
    assert [(m, v) for m, v, _ in verdicts([stopped])] == [("ghost-0", Ownership.LEAK)]
    assert verdicts([replace(HOST, runs=())]) == [("ghost-0", Ownership.FRESH, "it is just starting")]


def test_where_not_all_is_listed_only_our_own_fleets_that_are_down_are_judged():
    assert judge([HOST], {}, NOW, whole=False) == []
    down = KnownFleet(down_at=NOW - 3600, machines=frozenset({("ghost-d-0", "i-d")}))
    assert [s.machine for s in judge([DISPATCHER, HOST], {"ghost": down}, NOW, whole=False)] == ["ghost-d-0"]


def test_a_dispatcher_in_another_account_guards_the_hosts_of_its_fleet():
    (found,) = judge([HOST], {}, NOW, others=[DISPATCHER])
    assert (found.verdict, found.why) == (Ownership.ELSEWHERE,
                                          "fleet ghost of another machine: its dispatcher lives")
    assert [s.verdict for s in judge([HOST], {}, NOW, others=[replace(DISPATCHER, fleet="b")])] == [Ownership.LEAK]


def test_a_host_of_a_fleet_on_several_clouds_is_no_leak_while_its_dispatcher_may_be_out_of_sight():
    name = life("ghost", "01a2", several=True)
    host, head = replace(HOST, fleet=name), ended(replace(DISPATCHER, fleet=name), NOW - 7200)
    assert (name, is_life("ghost", name), on_several(name), on_several(life("ghost", "01a2"))) == (
        "ghost-m1a2", True, True, False)
    assert [(v, why) for _, v, why in verdicts([host])] == [
        (Ownership.ELSEWHERE, f"fleet {name} is on several clouds, and its dispatcher may be in one that is not listed "
                              "here")]
    assert [v for _, v, _ in verdicts([head, host])] == [Ownership.LEAK]
    assert [v for _, v, _ in verdicts([host], {name: KnownFleet(down_at=NOW - 7200)})] == [Ownership.LEAK]


def test_a_host_whose_dispatcher_has_just_ended_waits_for_the_next_one():
    assert verdicts([ended(DISPATCHER, NOW - 100), HOST]) == [
        ("ghost-0", Ownership.FRESH, "its dispatcher ended 100 s ago and may be replaced")]


@pytest.mark.parametrize("orphan_after_s, why", [
    (3600.0, "it may still train: its dispatcher ended 20 min ago, it ends itself in about 40 min"),
    (0.0, "it may still train, for it never ends itself"),
    (600.0, "it should have ended itself 10 min ago"),
])
def test_a_host_that_may_still_train_without_its_dispatcher_is_not_ended_without_saying_so(orphan_after_s, why):
    down = KnownFleet(down_at=NOW - 1000, orphan_after_s=orphan_after_s)
    (found,) = verdicts([ended(DISPATCHER, NOW - 1200), HOST], {"ghost": down})
    assert found == ("ghost-0", Ownership.LEAK, f"fleet ghost is down since 07:43:20 UTC; {why}")


# ---- the command


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour has passed since whatever the test does."""
    monkeypatch.setattr(leaks, "time", SimpleNamespace(
        time=lambda: time.time() + 3600, monotonic=time.monotonic, sleep=lambda _s: time.sleep(0.05)))


def forget(user, machine: str = "ghost-0", fleet: str = "ghost") -> None:
    """A machine lives of which no fleet remembers anything."""
    offer = user.cloud.offers(Need(instance_type="cpu.small", use_spot=False))[0]
    user.cloud.launch(LaunchRequest(machine, fleet, Role.WORKER, offer, Boot("none")))


def test_a_fleet_that_is_up_has_no_leaks(up, later):
    said = up.ok("leaks")
    assert (said.out, said.err) == ("", f"{NOT_ASKED}0 of 4 machines are leaks\n")
    assert json.loads(up.ok("leaks -o json").out) == []


def test_leaks_are_shown_with_their_price_and_end_with_exit_code_1(user, later):
    forget(user)
    said = user.types("leaks")
    assert said.code == 1 and said.err == (
        f"{NOT_ASKED}1 of 1 machine is a leak, $0.0850/h\nnext: spotfleet leaks --fix   (ends them)\n")
    head, row = said.out.splitlines()
    assert head.split() == ["machine", "fleet", "role", "pool", "since", "$/h", "verdict", "why"]
    assert row.split()[:4] == ["ghost-0", "ghost", "worker", "local/local-a/cpu.small/on-demand"]
    assert "$0.0850  leak     fleet ghost is not known here" in row
    (found,) = json.loads(user.types("leaks -o json").out)
    assert (found["machine"], found["verdict"], found["micros_h"]) == ("ghost-0", "leak", 85_000)
    assert "add -y" in user.fails("leaks --fix", code=2).err  # it asks, and nobody is there
    assert user.cloud.living() == ["ghost-0"]


def test_fix_ends_the_leaks_and_nothing_else(up, later):
    forget(up)
    fleet = sorted(set(up.cloud.living()) - {"ghost-0"})
    said = up.ok("leaks --fix -y")
    assert sorted(up.cloud.living()) == fleet and len(fleet) == 4
    assert "ending ghost-0" in said.err and said.err.endswith("ended: ghost-0\n")
    assert up.ok("leaks").out == ""


def test_a_leak_that_listings_still_show_as_alive_is_waited_for(user, later):
    forget(user)
    user.cloud.faults.listing_lag_s = 2.0  # longer than this process ever stands still before it lists again
    time.sleep(2.1)
    said = user.ok("leaks --fix -y")
    assert "waiting for the provider to end ghost-0" in said.err and "ghost-0" not in user.cloud.living()


def test_what_does_not_end_is_named(user, later, monkeypatch):
    forget(user)
    monkeypatch.setattr(leaks, "END_S", 0.1)
    monkeypatch.setattr(user.cloud, "terminate", lambda _request_id: None)
    assert "after 0.1 s the provider still lists ghost-0" in user.fails("leaks --fix -y").err


def test_a_fleet_of_another_laptop_is_shown_with_the_way_to_it_and_left_alone(up, later):
    shutil.rmtree(up.home / "fleets" / "digits")
    said = up.ok("leaks --fix -y")
    assert said.out.count("not ours  fleet digits of another machine: its dispatcher lives") == 4
    assert said.err == f"{NOT_ASKED}0 of 4 machines are leaks\nnext: spotfleet attach digits\n"
    assert len(up.cloud.living()) == 4


def test_what_has_just_begun_is_too_fresh_to_tell_and_never_ended(user):
    forget(user)
    said = user.ok("leaks --fix -y")
    assert "too fresh to tell" in said.out and "ghost-0" in user.cloud.living()


def test_a_fleet_that_is_made_while_the_cloud_is_being_listed_is_no_leak(user, later, monkeypatch):
    plain = user.cloud.hosts

    def hosts(fleet):
        if fleet == "" and not user.cloud.living():
            user.ok("up fleet.yaml -y")
        return plain(fleet)

    monkeypatch.setattr(user.cloud, "hosts", hosts)
    assert user.ok("leaks").err == f"{NOT_ASKED}0 of 4 machines are leaks\n"


def test_a_machine_that_ends_while_we_look_is_no_leak(user, later, monkeypatch):
    forget(user)
    plain = user.cloud.hosts

    def hosts(fleet):
        lines = plain(fleet)
        user.cloud.terminate("ghost-0")
        return lines

    monkeypatch.setattr(user.cloud, "hosts", hosts)
    assert user.ok("leaks").out == ""


def test_a_host_that_its_dispatcher_counts_as_gone_is_its_own_business(up, later, monkeypatch):
    plain = FakeDispatcher.status

    def status(dispatcher):
        told = plain(dispatcher)
        return replace(told, hosts=told.hosts[:-1])

    monkeypatch.setattr(FakeDispatcher, "status", status)
    assert up.ok("leaks").err == f"{NOT_ASKED}0 of 4 machines are leaks\n"


def test_what_is_ended_was_shown_as_a_leak_and_still_is_one(user, later):
    for name in ("still", "saved", "ripe"):
        forget(user, f"{name}-0", name)
    shown = leaks.search(Home(user.home)).suspects
    assert {s.verdict for s in shown} == {Ownership.LEAK}
    shown = [replace(s, verdict=Ownership.FRESH) if s.fleet == "ripe" else s for s in shown]
    offer = user.cloud.offers(Need(instance_type="cpu.small", use_spot=False))[0]
    InProcessProvider.launch(user.cloud, LaunchRequest("saved-d-1", "saved", Role.DISPATCHER, offer, Boot("none")))
    leaks.end(Home(user.home), shown, lambda _line: None)
    assert user.cloud.living() == ["saved-0", "ripe-0", "saved-d-1"]


def test_a_dispatcher_that_does_not_answer_is_said_to_be_so(up, later):
    up.dispatcher.stop()
    said = up.ok("leaks")
    assert said.out == "" and "fleet digits: its dispatcher does not answer, so its hosts are not judged" in said.err


def test_a_machine_that_outlived_its_fleet_is_found(up, later):
    up.ok("down -y")
    forget(up, "digits-99", "digits")
    said = up.types("leaks")
    assert said.code == 1 and "fleet digits is down since" in said.out
    up.ok("leaks --fix -y")
    assert up.cloud.living() == []

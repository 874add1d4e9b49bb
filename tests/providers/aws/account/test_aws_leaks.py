"""`spotfleet leaks` on AWS: what nothing accounts for is found by tag, also from a laptop that knows no fleet."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest
import typer

from spotfleet.api.account import leaks, listing, resources
from spotfleet.api.account.listing import KnownFleet
from spotfleet.api.account.resources import Ownership, judge
from spotfleet.api.home import Home
from spotfleet.cli.commands import leaks as leaks_command
from spotfleet.errors import NeedsPerson
from spotfleet.model import CloudHost, CloudState, Market, Offer, Role, Run
from spotfleet.providers import Resource
from spotfleet.providers.aws import session
from tests.providers.aws.account.test_resources import HERE, OURS, reopened, scatter
from tests.support.aws.aws_hosts import B, dispatcher, request
from tests.support.aws.aws_laptop import Laptop, laptop, later

NOW = 1_800_000_000.0
OLD = NOW - 7200.0
GROUP = Resource("security-group", "sg-1", HERE, "f", OLD)
OFFER = Offer("aws", HERE, f"{HERE}a", "g5.xlarge", Market.SPOT, 1, 352_100, 1_006_000, "A10G")
WORKER = CloudHost("f-1", "i-1", "f", Role.WORKER, OFFER, CloudState.RUNNING, (Run(OLD),))
BOSS = CloudHost("f-d-0", "i-d", "f", Role.DISPATCHER, OFFER, CloudState.RUNNING, (Run(OLD),))
GONE = CloudHost("f-d-0", "i-d", "f", Role.DISPATCHER, OFFER, CloudState.TERMINATED, (Run(OLD, OLD + 60),))


def verdicts(lines=(), known=None, thing=GROUP, doomed=()) -> list[tuple[Ownership, str]]:
    found = judge("aws", [thing], list(lines), known or {}, frozenset(doomed), NOW, leaks.FRESH_S)
    return [(t.verdict, t.why) for t in found]


# ---- the verdict


def test_what_a_fleet_has_that_nobody_knows_and_that_has_no_machine_is_a_leak():
    assert verdicts() == [(Ownership.LEAK, "fleet f is not known here, and no machine of it lives")]


@pytest.mark.parametrize("lines", [[BOSS], [WORKER], [BOSS, WORKER]])
def test_what_a_living_fleet_has_is_its_own(lines):
    for known in ({}, {"f": KnownFleet()}, {"f": KnownFleet(down_at=OLD)}):
        assert verdicts(lines, known) == []


def test_what_is_used_by_machines_that_are_leaks_is_one_with_them():
    assert verdicts([WORKER], doomed=["f-1"]) == [
        (Ownership.LEAK, "fleet f is not known here, and no machine of it lives; what of it lives is a leak")]


def test_what_a_fleet_of_ours_has_that_ended_itself_is_a_leak_with_the_way_to_end_it():
    assert verdicts([GONE], {"f": KnownFleet()}) == [
        (Ownership.LEAK, "fleet f has ended by itself; `spotfleet down f` removes it, too")]


def test_a_fleet_of_ours_is_named_as_here_where_it_is_to_be_ended():
    ((_, why),) = verdicts([GONE], {"f": KnownFleet(name="here")})
    assert why.endswith("`spotfleet down here` removes it, too")


def test_what_a_fleet_has_that_is_being_made_here_is_no_leak():
    assert verdicts([], {"f": KnownFleet(reached=False)}) == []


@pytest.mark.parametrize("lines, known, thing, why", [
    ([], {}, Resource("role", "r", "", "f", NOW - 60), "it was made 60 s ago"),
    ([], {"f": KnownFleet(down_at=NOW - 60)}, GROUP,
     "fleet f is down since 07:59:00 UTC, which the listing may not show yet"),
    ([CloudHost("f-d-0", "i-d", "f", Role.DISPATCHER, OFFER, CloudState.TERMINATED, (Run(OLD, NOW - 9),))], {}, GROUP,
     "the dispatcher of fleet f ended 9 s ago"),
])
def test_what_is_young_or_has_just_changed_is_left_alone(lines, known, thing, why):
    assert verdicts(lines, known, thing) == [(Ownership.FRESH, why)]


def test_of_things_without_an_age_nobody_knows_whether_they_are_young():
    assert verdicts(thing=Resource("key-pair", "k", HERE, "f", 0.0)) == [
        (Ownership.LEAK, "fleet f is not known here, and no machine of it lives")]


# ---- the command, with accounts on the fake


@pytest.fixture
def home(cloud, tmp_path, monkeypatch, hurried):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "house"))
    monkeypatch.setattr(resources, "POLL_S", 0.02)
    monkeypatch.setattr(resources, "SLOW_POLL_S", 0.05)
    session.reset()  # forget another test's cloud
    return tmp_path / "house"


@pytest.fixture
def hour(monkeypatch) -> None:
    later(monkeypatch, leaks)


def run(*, fix: bool = False, everywhere: bool = False, code: int = 0) -> None:
    try:
        leaks_command.leaks(fix=fix, yes=True, as_json=False, everywhere=everywhere)
        ended = 0
    except typer.Exit as exit:
        ended = exit.exit_code
    assert ended == code


def other_laptop(tmp, name: str = "f", **aws) -> Laptop:
    return laptop(tmp / "elsewhere", name=name, **aws)


def test_an_account_without_anything_of_ours_has_no_leaks(cloud, home, capsys):
    scatter(cloud, "mine", {"team": "blue"})
    run()
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("\nnothing of any fleet is listed\n")


def test_a_laptop_that_knows_no_fleet_finds_what_one_has_left_and_ends_it(cloud, home, tmp_path, capsys, hour):
    other_laptop(tmp_path).furnish(cloud)
    shutil.rmtree(tmp_path / "elsewhere")
    scatter(cloud, "mine", {"team": "blue"})
    foreign = [t for t in cloud.everything() if t.name == "mine" or t.tags.get("team") == "blue"]
    scatter(cloud, "spotfleet-f-x", OURS)
    run(code=1)
    said = capsys.readouterr()
    assert "3 of 3 machines are leaks" in said.err and "spotfleet leaks --fix" in said.err
    for kind in ("security-group", "role", "instance-profile", "sqs-queue", "volume", "network-interface"):
        assert kind in said.out
    run(fix=True)
    assert "ended: f-1" in capsys.readouterr().err
    assert [t for t in cloud.everything() if t not in foreign] == []
    assert len(foreign) == len(cloud.everything())
    run()
    assert "nothing of any fleet is listed\n" in capsys.readouterr().err


def test_a_living_fleet_of_another_laptop_is_told_apart_and_nothing_of_it_is_touched(cloud, home, tmp_path, capsys,
                                                                                    hour):
    provider = other_laptop(tmp_path).prepare()
    provider.launch(dispatcher())
    provider.launch(request(B, "f-1"))
    cloud.settle()
    shutil.rmtree(tmp_path / "elsewhere")
    before = cloud.everything()
    run(fix=True)
    said = capsys.readouterr()
    assert said.out.count("not ours  fleet f of another machine: its dispatcher lives") == 2
    assert "spotfleet attach f --provider aws" in said.err and "security-group" not in said.out
    assert cloud.everything() == before


def test_what_another_laptop_is_just_making_is_left_alone(cloud, home, tmp_path, capsys):
    other_laptop(tmp_path).prepare()
    before = cloud.everything()
    run(fix=True)
    assert "too fresh to tell" in capsys.readouterr().out
    assert cloud.everything() == before


def test_a_fleet_here_that_is_being_made_has_no_leaks(cloud, home, capsys, hour):
    laptop(home).prepare()
    run(fix=True)
    assert capsys.readouterr().out == "" and len(cloud.everything()) > 5


def test_what_a_fleet_here_has_that_ended_itself_is_shown_and_removed(cloud, home, capsys, hour):
    here = laptop(home)
    here.prepare()
    here.folder.update(reached=True)
    run(code=1)
    assert "fleet f has ended by itself; `spotfleet down f` removes it, too" in capsys.readouterr().out
    run(fix=True)
    assert cloud.everything() == []


def test_a_request_that_waits_for_room_is_a_leak_and_no_machine(cloud, home, capsys, hour):
    reopened(cloud, {**OURS, "spotfleet-role": "worker", "spotfleet-pool": "x"})
    run(code=1)
    said = capsys.readouterr()
    assert "spot-instances-request" in said.out and "open" in said.out
    assert "0 of 0 machines are leaks; and 1 other thing" in said.err
    run(fix=True)
    cloud.set_room(f"{HERE}a", "g5.xlarge", None)
    cloud.settle()
    assert cloud.everything() == []


def test_fleets_of_one_account_are_one_account_whatever_their_regions(cloud, home, capsys, hour):
    """A fleet of the west is no stranger to the listing that a fleet of the east asks for."""
    for name, region in (("f", HERE), ("g", "us-west-2")):
        here = laptop(home, name=name, regions=(region,))
        here.prepare()
        here.folder.update(reached=True)
    found = leaks.search(Home(home))
    assert {t.fleet: {u.region for u in found.things if u.fleet == t.fleet} for t in found.things} == {
        "f": {HERE, ""}, "g": {"us-west-2", ""}}
    assert all("has ended by itself" in t.why for t in found.things)
    assert len({t.key for t in found.things}) == len(found.things)


def test_all_regions_are_asked_on_demand_and_those_that_refuse_are_told(cloud, home, tmp_path, capsys, hour):
    other_laptop(tmp_path, regions=("eu-west-1",)).prepare()
    shutil.rmtree(tmp_path / "elsewhere")
    run()
    capsys.readouterr()
    refuse = {"region": "us-west-2"}

    def before(call) -> None:
        if call.region == refuse["region"] and call.service == "ec2":
            cloud.deny("owner", {"ec2:*"})
        else:
            cloud.deny("owner", set())

    cloud.before = before
    try:
        run(everywhere=True, code=1)
    finally:
        cloud.before = None
    said = capsys.readouterr()
    assert "note: us-west-2 was not asked: " in said.err and "eu-west-1" in said.out
    run(fix=True, everywhere=True)
    assert cloud.everything() == []


def test_where_a_region_does_not_answer_its_dispatcher_may_live_and_no_host_is_ended(cloud, home, tmp_path, capsys,
                                                                                    hour):
    far = other_laptop(tmp_path, regions=("eu-west-1", "us-west-2")).prepare()
    worker = request(B, "f-1")
    far.launch(replace(worker, offer=replace(worker.offer, region="eu-west-1", zone="eu-west-1a")))
    cloud.settle()
    shutil.rmtree(tmp_path / "elsewhere")
    cloud.before = lambda call: cloud.deny("owner", {"ec2:*"} if (call.region, call.service) == ("us-west-2", "ec2")
                                           else set())
    try:
        run(everywhere=True, fix=True)
    finally:
        cloud.before = None
    said = capsys.readouterr().err
    assert "note: a dispatcher may be there: hosts of which none is listed elsewhere are not judged" in said
    assert len(cloud.instances()) == 1


def test_who_names_profiles_and_may_not_list_roles_looks_for_leaks_of_the_other_kinds(cloud, home, capsys, hour):
    here = laptop(home, dispatcher_profile="boss", host_profile="hand")
    here.prepare()
    here.folder.update(reached=True)
    cloud.deny("owner", {"iam:ListRoles", "iam:ListInstanceProfiles"})
    run(fix=True)
    assert cloud.everything() == []
    laptop(home, name="g")  # whose roles are made
    with pytest.raises(NeedsPerson, match="List"):
        run()


def test_without_credentials_the_other_accounts_are_asked_and_aws_is_told(cloud, home, monkeypatch, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    run()
    said = capsys.readouterr()
    assert "note: aws was not asked: " in said.err and "no valid credentials" in said.err


def test_for_programs_things_stand_beside_machines(cloud, home, tmp_path, capsys, hour):
    other_laptop(tmp_path).prepare()
    shutil.rmtree(tmp_path / "elsewhere")
    with pytest.raises(typer.Exit):
        leaks_command.leaks(fix=False, yes=False, as_json=True, everywhere=False)
    told = json.loads(capsys.readouterr().out)
    group = next(t for t in told if t.get("kind") == "security-group")
    assert (group["fleet"], group["provider"], group["verdict"], group["region"]) == ("f", "aws", "leak", HERE)
    assert time.time() - 3600 < group["since"] <= time.time()


def test_what_is_removed_was_shown_as_a_leak(cloud, home, tmp_path, hour):
    other_laptop(tmp_path).prepare()
    shutil.rmtree(tmp_path / "elsewhere")
    house = Home(home)
    shown = leaks.search(house)
    (group, *_rest) = [t for t in shown.left if t.kind == "security-group"]
    leaks.end(house, shown.leaks, lambda _line: None, [group])
    assert group.key not in {t.key for t in leaks.search(house).left}
    assert len(leaks.search(house).left) == len(shown.left) - 1


def test_one_account_is_one_whatever_else_its_configuration_says():
    plain = {"endpoint_url": "http://x", "aws": json.dumps({"regions": [HERE]}), "secret": "s", "public_key": "p"}
    other = {"endpoint_url": "http://x", "aws": json.dumps({"regions": ["us-west-2"], "image": "ami-1"})}
    assert listing.account_of("aws", plain) == listing.account_of("aws", other)
    profile = {"endpoint_url": "http://x", "aws": json.dumps({"profile": "work"})}
    assert listing.account_of("aws", profile) != listing.account_of("aws", other)

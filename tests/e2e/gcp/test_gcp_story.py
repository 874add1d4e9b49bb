"""The whole way on Google Cloud, against a fake whose instances really run: from their user data alone.

Real are the command line, google-cloud-compute and google-auth, cloud-init, sshd, bootstrap, dispatcher, agents and
workers; the cloud and its metadata servers are tests/support/fakes/gcp. Nothing here has ever been run against Google
Cloud itself. One fleet serves all tests; they build on each other, and the last ones take it down and look what is
left.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest

from spotfleet.providers.gcp.mapping import names
from tests.support.aws.aws_stage import timed
from tests.support.gcp.gcp_stage import USER, GcpStage, why_not

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.skipif(bool(why_not()), reason=why_not())]
GOES_ON_S = 60.0  # on a machine with much else to do; what is promised is measured in bench/


@pytest.fixture(scope="module")
def stage() -> Iterator[GcpStage]:
    """Laptop and dispatcher may do what `check gcp --policy` says, and nothing else."""
    with GcpStage.made() as stage:
        stage.fleet_file(nodes={"min": 2, "target": 2})
        stage.restrict()
        yield stage


def test_up_shows_what_it_will_cost_and_machines_come_up_from_their_user_data_alone(stage: GcpStage):
    shown = stage.cli("up", "fleet.yaml", "--dryrun").stdout
    print(shown)
    assert stage.cloud.everything() == []
    assert re.search(r"us-central1.*\$?0\.\d+", shown)
    print(f"up: {timed(lambda: stage.cli('up', 'fleet.yaml', '-y')):.1f} s")
    print(stage.said[-1])
    workers = stage.instances("worker")
    assert (len(workers), len(stage.instances("dispatcher"))) == (2, 1)
    assert {view.market for view in workers} == {"spot"}
    for view in workers:
        assert stage.cloud.machine(view.id).notice_s == 120.0


def test_a_host_knows_no_cloud_s_sdk_and_the_dispatcher_calls_as_its_service_account(stage: GcpStage):
    for view in stage.instances("worker"):
        assert not stage.machine(view).path("/var/log/installs.log").exists()
        assert any("spotfleet.agent" in line for line in stage.machine(view).processes())
    stage.wait("its requests", lambda: stage.cloud.actions(stage.cloud.default_account))
    assert {c.principal for c in stage.cloud.calls} == {USER, stage.cloud.default_account}


def test_a_noticed_host_is_replaced_from_another_pool_before_it_is_lost(stage: GcpStage):
    job = stage.train((2, 2))
    victim, survivor = before = stage.instances("worker")
    stage.wait("two that train", lambda: stage.training(before))
    generation = stage.job(job).generation
    begun = time.monotonic()
    stage.cloud.preempt(victim.id, room=0)  # with its 120 seconds, which its host counts on
    stage.wait("a replacement", lambda: len(stage.instances("worker")) == 3)
    launched_s = time.monotonic() - begun
    (new,) = [view for view in stage.instances("worker") if view.id not in (victim.id, survivor.id)]
    assert stage.cloud.instance(victim.id).status == "RUNNING"  # not lost yet
    assert (new.zone, new.type) != (victim.zone, victim.type)  # where there is room
    stage.wait("both that go on", lambda: stage.training([survivor, new]))
    next_s = next(s.at for s in stage.steps(survivor) if s.generation > generation) - begun
    pauses = [b.at - a.at for a, b in zip(stage.steps(survivor), stage.steps(survivor)[1:], strict=False)]
    print(f"notice: replacement launched after {launched_s:.1f} s, warm and training after {next_s:.1f} s, "
          f"longest pause {max(pauses):.2f} s")
    assert max(pauses) < GOES_ON_S
    stage.wait("its end", lambda: victim.id not in {v.id for v in stage.instances()}, 180.0)
    stage.enough()
    stage.wait("the job's end", lambda: stage.job(job).state == "succeeded")


def test_a_host_that_is_killed_is_started_again_with_its_disk(stage: GcpStage):
    """The fleet's hosts are stopped, and the dispatcher starts them where there is room: nobody else does."""
    victim = stage.instances("worker")[0]
    (stage.home(victim) / "mark").touch()
    stage.cloud.preempt(victim.id, notice_s=None, room=None)
    stage.wait("its return", lambda: stage.cloud.instance(victim.id).run == 2)
    started = [c for c in stage.cloud.calls if c.action == "compute.instances.start" and not c.code]
    assert {c.principal for c in started} == {stage.cloud.default_account}
    stage.wait("two that are up", lambda: [h.host for h in stage.call(lambda c: c.status()).hosts if (
        h.role, h.state) == ("worker", "up")] == sorted(names.host_of(v.name) for v in stage.instances("worker")))
    assert (stage.home(victim) / "mark").exists()


def test_hosts_are_entered_through_the_dispatcher_alone(stage: GcpStage):
    stage.cli("status")
    views = stage.instances("worker")
    said = stage.cli("exec", "--all", "--", "hostname", ok=False).stdout  # a host that is stopped does not answer
    assert {view.name for view in views} <= {line.rpartition(": ")[2] for line in said.splitlines()}
    host = names.host_of(views[0].name)
    assert stage.cli("ssh", host, "--", "whoami").stdout == "ubuntu\n"
    for view in views:  # there is no way past the dispatcher
        past = stage.machines.laptop.run("ssh", "-oConnectTimeout=2", f"ubuntu@{view.public_ip}", ok=False)
        assert past.returncode == 255 and "Permission denied" not in past.stderr


def test_down_removes_all_of_it_and_proves_that(stage: GcpStage):
    assert json.loads(stage.cli("status", "-o", "json").stdout)["state"] == "up"
    print(f"down: {timed(lambda: stage.cli('down', '-y')):.1f} s")
    print(stage.said[-1])
    assert stage.cloud.everything() == [], stage.story()
    assert list(stage.machines) == []
    assert json.loads(stage.cli("leaks", "--all-regions", "-o", "json").stdout) == []


def test_every_sample_was_counted_once_in_each_epoch(stage: GcpStage):
    assert stage.wrongly_counted() == []


def test_the_bill_is_what_the_cloud_s_own_books_say(stage: GcpStage):
    lines = json.loads(stage.cli("cost", "-o", "json").stdout)["lines"]
    ours: dict[str, float] = {}
    for line in lines:  # a host that returned has one for each of its runs
        ours[line["host"]] = ours.get(line["host"], 0.0) + line["micros"] / 1e6
    books = stage.bills()
    print(stage.cli("cost").stdout)
    assert ours.keys() == books.keys()
    for host, usd in books.items():
        assert abs(ours[host] - usd) <= 3 * usd / 60, (host, ours[host], usd)  # whole seconds; a host taken is free


def test_the_roles_that_are_printed_suffice(stage: GcpStage):
    assert stage.denials() == []

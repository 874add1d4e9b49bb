"""The whole way on Google Cloud, against a fake whose instances really run: from their user data alone.

Real are the command line, google-cloud-compute and google-auth, cloud-init, sshd, bootstrap, dispatcher, agents and
workers; the cloud and its metadata servers are tests/support/fakes/gcp. Nothing here has ever been run against Google
Cloud itself. One fleet serves all tests; they build on each other, and the last ones take it down and look what is
left.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfleet.providers.gcp.mapping import names
from tests.support.e2e import cloud_story
from tests.support.gcp.gcp_stage import USER, GcpStage, why_not

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def stage() -> Iterator[GcpStage]:
    """Laptop and dispatcher may do what `check gcp --policy` says, and nothing else."""
    with GcpStage.made() as stage:
        stage.fleet_file(nodes={"min": 2, "target": 2})
        stage.restrict()
        yield stage


def test_up_shows_what_it_will_cost_and_machines_come_up_from_their_user_data_alone(stage: GcpStage):
    cloud_story.comes_up(stage, "us-central1")
    for view in stage.instances("worker"):
        assert stage.cloud.machine(view.id).notice_s == 120.0


def test_a_host_knows_no_cloud_s_sdk_and_the_dispatcher_calls_as_its_service_account(stage: GcpStage):
    for view in stage.instances("worker"):
        assert not stage.machine(view).path("/var/log/installs.log").exists()
        assert any("spotfleet.agent" in line for line in stage.machine(view).processes())
    stage.wait("its requests", lambda: stage.cloud.actions(stage.cloud.default_account))
    assert {c.principal for c in stage.cloud.calls} == {USER, stage.cloud.default_account}


def test_a_noticed_host_is_replaced_from_another_pool_before_it_is_lost(stage: GcpStage):
    cloud_story.replaced_at_a_notice(
        stage, lambda view: stage.cloud.preempt(view.id, room=0),  # with its 120 seconds, which its host counts on
        lambda view: view.id in {v.id for v in stage.instances()}, 180.0)


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
    cloud_story.no_way_past_the_dispatcher(stage)


def test_down_removes_all_of_it_and_proves_that(stage: GcpStage):
    cloud_story.goes_down(stage)


def test_every_sample_was_counted_once_in_each_epoch(stage: GcpStage):
    assert stage.wrongly_counted() == []


def test_the_bill_is_what_the_cloud_s_own_books_say(stage: GcpStage):
    cloud_story.bill_agrees(stage)


def test_the_roles_that_are_printed_suffice(stage: GcpStage):
    assert stage.denials() == []

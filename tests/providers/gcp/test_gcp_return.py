"""Preempted hosts that were stopped: the dispatcher starts them again for a while."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.gcp import terminate
from tests.providers.gcp.test_gcp_launch import DISPATCHER, KIND, A, B, request


@pytest.fixture
def dispatcher(gcp):
    return gcp(side="dispatcher")


def only(lines: list[CloudHost]) -> CloudHost:
    [line] = lines
    return line


def stopped(provider, cloud, room: int | None = 0) -> CloudHost:
    """A host that the cloud has stopped, and whose pool has so much room."""
    provider.launch(request(interruption_behavior="stop"))
    cloud.preempt(cloud.instances()[0].name, notice_s=None, room=room)
    return only(provider.hosts("f"))


def test_a_stopped_host_comes_back_once_there_is_room(dispatcher, cloud, cloud_time, monkeypatch):
    monkeypatch.setattr(terminate, "AGAIN_S", 0.0)
    before = stopped(dispatcher, cloud)
    assert before.state is CloudState.STOPPED and before.runs[-1].taken
    cloud_time.at += 30
    assert only(dispatcher.hosts("f")).state is CloudState.STOPPED
    cloud.set_room(A.zone, KIND, 1)
    cloud_time.at += 30
    dispatcher.hosts("f")
    back = only(dispatcher.hosts("f"))
    assert (back.state, back.provider_id, len(back.runs)) == (CloudState.RUNNING, before.provider_id, 2)
    assert back.runs[0] == before.runs[0] and back.runs[1].ended_at is None


def test_only_the_dispatcher_starts_hosts(gcp, cloud):
    laptop = gcp()
    assert stopped(laptop, cloud, room=1).state is CloudState.STOPPED
    laptop.hosts("f")
    assert only(laptop.hosts("f")).state is CloudState.STOPPED


def test_a_host_is_not_started_after_the_time_for_its_return(dispatcher, gcp, cloud, cloud_time, monkeypatch):
    monkeypatch.setattr(terminate.time, "time", cloud_time)
    laptop = gcp()
    stopped(laptop, cloud, room=1)
    cloud_time.at += terminate.RETURN_S + 1
    dispatcher.hosts("f")
    assert only(dispatcher.hosts("f")).state is CloudState.STOPPED
    dispatcher.terminate("f-1")
    assert only(dispatcher.hosts("f")).state is CloudState.TERMINATED and cloud.everything() == []


@pytest.mark.parametrize("behavior, state", [("stop", CloudState.STOPPED), ("terminate", CloudState.TERMINATED)])
def test_a_host_whose_longest_run_is_over_ends_and_is_not_started(dispatcher, cloud, cloud_time, behavior, state):
    boot = Boot("idle_host", {"boot.json": '{"lifetime_s": 600}'})
    dispatcher.launch(replace(request(interruption_behavior=behavior), boot=boot))
    cloud_time.at += 600 + 3600 + 1
    cloud.tick()
    dispatcher.hosts("f")
    line = only(dispatcher.hosts("f"))
    assert (line.state, line.runs[-1].taken, "run time" in line.why) == (state, False, True)
    assert line.runs[-1].ended_at is not None and line.runs[-1].ended_at - line.runs[-1].started_at > 4190


def test_a_host_that_shut_itself_down_is_not_started(dispatcher, cloud):
    dispatcher.launch(request())
    cloud.guest_shutdown(cloud.instances()[0].name)
    dispatcher.hosts("f")
    line = only(dispatcher.hosts("f"))
    assert line.state is CloudState.STOPPED and not line.runs[-1].taken and "shut down" in line.why


def test_attempts_to_start_a_host_keep_a_distance(dispatcher, cloud):
    stopped(dispatcher, cloud)
    cloud.forget_calls()
    for _ in range(5):
        dispatcher.hosts("f")
    assert sum(c.action == "compute.instances.start" for c in cloud.calls) <= 1


def test_an_exercise_preempts_a_spot_host_and_no_other(dispatcher, cloud, cloud_time):
    dispatcher.launch(request())
    dispatcher.interrupt("f-1", None)
    cloud_time.at += 200
    cloud.tick()
    line = only(dispatcher.hosts("f"))
    assert line.state is CloudState.TERMINATED and line.runs[-1].taken
    dispatcher.launch(LaunchRequest("f-d-0", "f", Role.DISPATCHER, DISPATCHER, Boot("idle_host")))
    with pytest.raises(UsageError, match="takes no on-demand machine back"):
        dispatcher.interrupt("f-d-0", None)


def test_a_zone_that_does_not_answer_ends_no_host(dispatcher, cloud):
    dispatcher.launch(request())
    cloud.unreachable.add(f"zones/{A.zone}")
    with pytest.raises(SpotfleetError):
        dispatcher.hosts("f")
    with pytest.raises(SpotfleetError, match=A.zone):
        dispatcher.terminate("f-1")
    cloud.unreachable.clear()
    assert only(dispatcher.hosts("f")).state is CloudState.RUNNING


@pytest.mark.parametrize("warns", [False, True], ids=["unreachables", "a warning of the zone"])
def test_a_zone_that_does_not_answer_any_more_has_its_hosts_of_before_and_the_others_go_on(dispatcher, cloud, warns):
    dispatcher.launch(request())
    dispatcher.launch(request(B, "f-2"))
    before = dispatcher.hosts("f")
    cloud.unreachable_warns = warns
    cloud.unreachable.add(f"zones/{A.zone}")
    assert dispatcher.hosts("f") == before
    dispatcher.terminate("f-2")
    dispatcher.launch(request(B, "f-3"))
    assert {h.request_id: h.state for h in dispatcher.hosts("f")} == {
        "f-1": CloudState.RUNNING, "f-2": CloudState.TERMINATED, "f-3": CloudState.RUNNING}
    cloud.unreachable.clear()
    dispatcher.terminate("f-1")
    assert [h.request_id for h in dispatcher.hosts("f") if h.state is CloudState.RUNNING] == ["f-3"]


def test_a_change_of_tags_that_another_overtook_is_made_again(dispatcher, cloud):
    dispatcher.launch(request())
    cloud.fault("compute.instances.setMetadata", code="conditionNotMet", times=2)
    dispatcher.tag("f-1", {"a": "b"})
    assert cloud.instances()[0].metadata["a"] == "b"

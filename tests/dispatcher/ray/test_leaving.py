"""Hosts that leave a Ray cluster: until when their raylets stay, and what Ray is asked for. No Ray."""

from __future__ import annotations

from spotfleet.dispatcher.hosts import DRAIN_S, Departure
from spotfleet.dispatcher.ray.leaving import LEAD_S, YIELD_S, LeavingHosts, kept
from spotfleet.protocol.ray_cluster import RayDrain, RayNode, RayState


def state(*hosts: str, up: bool = True) -> RayState:
    return RayState(up, tuple(RayNode(f"id-{host}", host) for host in hosts))


def test_a_notice_drains_with_its_own_deadline_and_a_surplus_host_only_ends_while_it_is_idle():
    found = LeavingHosts().update({"a": (Departure(90.0, "notice"), False), "b": (Departure(DRAIN_S, "drain"), False)},
                                  now=10.0)
    assert [h.drain for h in found] == [RayDrain("a", 90.0, "the cloud takes this host"),
                                        RayDrain("b", DRAIN_S, "the fleet gives this host back", idle_only=True)]


def test_a_raylet_stays_while_something_may_run_there_and_ends_before_its_host_goes():
    hosts = LeavingHosts()
    early = hosts.update({"a": (Departure(LEAD_S + 1, "notice"), False)}, now=0.0)
    assert kept(early, state("", "a", "b")) == {"a"}
    assert kept(early, state("", "b")) == frozenset()  # its node has ended: nothing ran there any more
    late = hosts.update({"a": (Departure(LEAD_S - 1, "notice"), False)}, now=2.0)
    assert kept(late, state("", "a", "b")) == frozenset()


def test_a_raylet_of_a_lost_head_keeps_no_host():
    found = LeavingHosts().update({"a": (Departure(60.0, "notice"), False)}, now=0.0)
    assert kept(found, None) == kept(found, state("a", up=False)) == frozenset()


def test_a_host_that_another_job_is_to_get_is_kept_for_a_limited_time():
    hosts, gives = LeavingHosts(), {"a": (Departure(DRAIN_S, "drain"), True)}  # the time left never passes by itself
    assert kept(hosts.update(gives, now=0.0), state("a")) == {"a"}
    assert kept(hosts.update(gives, now=YIELD_S - LEAD_S - 1), state("a")) == {"a"}
    assert kept(hosts.update(gives, now=YIELD_S - LEAD_S + 1), state("a")) == frozenset()
    hosts.update({}, now=YIELD_S)
    assert kept(hosts.update(gives, now=YIELD_S + 1), state("a")) == {"a"}  # it stayed, and leaves again


def test_a_drain_ends_after_its_time_although_the_ledger_counts_it_anew():
    hosts, drains = LeavingHosts(), {"a": (Departure(DRAIN_S, "drain"), False)}
    hosts.update(drains, now=0.0)
    assert kept(hosts.update(drains, now=DRAIN_S - LEAD_S - 1), state("a")) == {"a"}
    assert kept(hosts.update(drains, now=DRAIN_S - LEAD_S + 1), state("a")) == frozenset()

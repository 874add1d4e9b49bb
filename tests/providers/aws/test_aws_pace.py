"""Many hosts at once stay below EC2's rate limits, which the whole account shares."""

from __future__ import annotations

import pytest

from spotfleet.model import Market
from spotfleet.providers.aws import session
from tests.support.aws.aws_hosts import A, pool, prepared, request

HOSTS = 55  # more than a bucket holds


def refused(cloud) -> list[str]:
    return [c.action for c in cloud.calls if c.code == "RequestLimitExceeded"]


def test_many_launches_and_ends_at_once_are_paced_and_none_is_refused(aws, cloud, clock):
    provider = prepared(aws)
    cloud.throttles = True
    for n in range(HOSTS):
        provider.launch(request(A, f"f-{n}"))
    assert (refused(cloud), len(cloud.instances())) == ([], HOSTS)
    assert clock.slept_s == pytest.approx((HOSTS - session.CHANGES_AT_ONCE) / session.CHANGES_PER_S, abs=1.0)
    for n in range(HOSTS):
        provider.terminate(f"f-{n}")
    assert (refused(cloud), cloud.instances()) == ([], [])


def test_launches_on_demand_are_slower_as_run_instances_takes_fewer(aws, cloud, clock):
    provider = prepared(aws)
    cloud.throttles = True
    for n in range(HOSTS):
        provider.launch(request(pool(market=Market.ON_DEMAND), f"f-{n}"))
    assert (refused(cloud), len(cloud.instances())) == ([], HOSTS)
    assert clock.slept_s == pytest.approx((HOSTS - session.RUNS_AT_ONCE) / session.RUNS_PER_S, abs=1.0)


def test_a_few_hosts_wait_for_nothing(aws, cloud, clock):
    provider = prepared(aws)
    for n in range(session.CHANGES_AT_ONCE):
        provider.launch(request(A, f"f-{n}"))
    assert clock.slept_s == pytest.approx(0.0, abs=1e-6)

"""What we count for a host's runs is what EC2 bills for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotfleet.fleet.cost.billing import PriceChangePoint, pieces
from tests.support.aws.aws_hosts import A, line, prepared, request

ENDS: dict[str, Callable] = {
    "EC2 takes it": lambda provider, cloud, id: cloud.take(id),
    "we end it": lambda provider, cloud, id: provider.terminate("f-1"),
    "chaos takes it": lambda provider, cloud, id: provider.interrupt("f-1", None),
    "it goes on": lambda provider, cloud, id: None,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("age_s", [300.0, 4000.0], ids=["first hour", "later"])
def test_a_run_costs_what_ec2_bills_for_it(aws, cloud, monkeypatch, end: str, age_s: float):
    provider, began = prepared(aws), cloud.clock()
    provider.launch(request(A))
    (made,) = cloud.instances()
    monkeypatch.setattr(cloud, "clock", lambda: began + age_s)
    ENDS[end](provider, cloud, made.id)
    ours = pieces(line(provider).runs[0], [PriceChangePoint(0.0, 1_000_000, 1_000_000)], provider.billing(),
                  began + age_s)
    micros_h = round(cloud.price("us-east-1a", "g5.xlarge") * 1e6)
    cost = sum(p.parts for p in ours) / 3600 / 1e6 * micros_h / 1e6
    assert cost == pytest.approx(cloud.invoice()[made.id], abs=2 * micros_h / 1e6 / 3600)  # EC2 lists whole seconds
    assert (cost == 0) == (end == "EC2 takes it" and age_s < 3600)

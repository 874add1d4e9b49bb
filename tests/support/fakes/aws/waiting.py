"""Spot requests that wait for room."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.fakes.aws.birth import new_id
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.life import NO_ROOM, Life
from tests.support.fakes.aws.state import RegionState, SpotRequest


def look_again(life: Life, state: RegionState) -> None:
    """Serve open and disabled requests where there is room."""
    now = life.cloud.now()
    for request in list(state.requests.values()):
        if now < request.looks_at:
            continue
        code = request.now.code
        if request.state == "disabled" and code == "instance-stopped-no-capacity":
            machine = life.cloud.find(request.instance_id)
            if machine is not None and machine.state == "stopped":
                _try(life, state, request, lambda m=machine: life.start(m))
        elif request.state == "open":
            _try(life, state, request, lambda r=request: _again(life, state, r))


def _try(life: Life, state: RegionState, request: SpotRequest, act: Callable[[], None]) -> None:
    now = life.cloud.now()
    holding = {
        "InsufficientInstanceCapacity": "capacity-not-available",
        "SpotMaxPriceTooLow": "price-too-low",
        "MaxSpotInstanceCountExceeded": "limit-exceeded",
    }
    try:
        act()
    except AwsError as error:
        request.looks_at = now + life.cloud.retry_s
        code = holding.get(error.code, "bad-parameters")
        if request.state == "open" and request.now.code != code:
            request.become(now, "open", code, error.message)


def _again(life: Life, state: RegionState, request: SpotRequest) -> None:
    """An instance for an open persistent request: a new one."""
    order, market, now = request.order, life.cloud.market, life.cloud.now()
    room = market.room((order.zone, order.type, "spot"))
    if room is not None and room < 1:
        raise AwsError("InsufficientInstanceCapacity", NO_ROOM.format(kind=order.type, zone=order.zone))
    if market.price(order.zone, order.type, now) > request.price:
        raise AwsError("SpotMaxPriceTooLow", "price too low")
    market.within_quota(state, order.type, "spot", 1, [request.id])
    life.born(state, order, 0, new_id("r"), "", request, tagged=life.cloud.relaunched_tagged)

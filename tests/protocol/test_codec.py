"""Messages and their texts."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotfleet.codec import from_json, to_json, to_text
from spotfleet.fleet.domain.state import FleetState
from spotfleet.model import BillingRules
from spotfleet.protocol.messages import AgentOrders, AgentReport, FleetStatus, dump, load

FINITE = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, FINITE)
MESSAGES = st.one_of(*map(st.from_type, (AgentReport, AgentOrders, FleetStatus)))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(MESSAGES)
def test_a_message_is_what_its_text_says(message):
    assert dump(message) == json.dumps(to_json(message), separators=(",", ":"))
    assert load(type(message), dump(message)) == message


def test_texts_of_equal_tuples_of_other_types_are_not_mixed_up():
    assert [to_text(("1", "2")), to_text((1, 2)), to_text((True, 2)), to_text((1.0, 2)), to_text(("a", None))] == [
        '["1","2"]', "[1,2]", "[true,2]", "[1.0,2]", '["a",null]']


def test_what_is_no_dataclass_has_a_text_too():
    value = {"rules": BillingRules(60, 0), "list": [1, "é", {"x": (None,)}], "empty": ()}
    assert to_text(value) == json.dumps(to_json(value), separators=(",", ":"))
    assert to_text(FleetState()) == json.dumps(to_json(FleetState()), separators=(",", ":"))
    assert from_json(BillingRules, json.loads(to_text(BillingRules(7, 8)))) == BillingRules(7, 8)

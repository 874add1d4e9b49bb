"""Copies of frozen values are those that `dataclasses` makes."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.policy.values import DecisionInput


@dataclasses.dataclass(frozen=True)
class Square:
    side: int
    name: str = ""

    DERIVED: ClassVar = {"border": ("side",)}

    @cached_property
    def area(self) -> int:
        return self.side**2

    @cached_property
    def border(self) -> list[int]:
        return [self.side] * 4


@given(st.fixed_dictionaries({}, optional={"now": st.floats(), "hosts": st.integers(), "room": st.none()}))
def test_a_copy_is_the_one_that_dataclasses_makes(fields):
    moment = DecisionInput(1.0, 2, room=7)
    assert repr(replace(moment, **fields)) == repr(dataclasses.replace(moment, **fields))
    assert moment == DecisionInput(1.0, 2, room=7)


def test_what_was_derived_is_derived_anew():
    square = Square(3)
    assert (square.area, replace(square, side=4).area, square.area) == (9, 16, 9)


def test_what_depends_on_one_field_alone_is_kept_while_that_stays():
    square = Square(3)
    assert square.border == [3] * 4
    assert replace(square, name="red").border is square.border
    assert replace(square, side=4).border == [4] * 4


def test_an_unknown_field_is_told():
    with pytest.raises(TypeError, match="Square has no corners, sides"):
        replace(Square(3), sides=4, corners=4)

"""Names of a fleet in the cloud: one name for each of its lives."""

from __future__ import annotations

import re


def life(fleet: str, digits: str) -> str:
    """Return the cloud name of one life of a fleet, made unique by four hexadecimal digits.

    A cloud's records of an earlier life, or of a fleet of that name in another region, then do not match.
    """
    return f"{fleet}-{digits}"


def any_life(fleet: str) -> str:
    """Return a pattern with `?` for all lives, as clouds' filters and policies use it."""
    return life(fleet, "????")


def is_life(fleet: str, cloud_name: str) -> bool:
    return cloud_name == fleet or re.fullmatch(life(re.escape(fleet), "[0-9a-f]{4}"), cloud_name) is not None

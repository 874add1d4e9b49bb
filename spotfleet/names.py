"""Names of a fleet in the cloud: one name for each of its lives."""

from __future__ import annotations

import re

SEVERAL = "m"  # instead of the first digit: the fleet is on several clouds


def life(fleet: str, digits: str, *, several: bool = False) -> str:
    """Return the cloud name of one life of a fleet, made unique by four hexadecimal digits.

    A cloud's records of an earlier life, or of a fleet of that name in another region, then do not match. `several`:
    the fleet is on several clouds, and so its dispatcher may be missing from the listing of an account with its hosts.
    """
    return f"{fleet}-{SEVERAL}{digits[1:]}" if several else f"{fleet}-{digits}"


def on_several(cloud_name: str) -> bool:
    """Return whether a fleet of this name may be on several clouds."""
    return re.fullmatch(f".+-{SEVERAL}[0-9a-f]{{3}}", cloud_name) is not None


def any_life(fleet: str) -> str:
    """Return a pattern with `?` for all lives, as clouds' filters and policies use it."""
    return life(fleet, "????")


def is_life(fleet: str, cloud_name: str) -> bool:
    pattern = life(re.escape(fleet), f"[0-9a-f{SEVERAL}][0-9a-f]{{3}}")
    return cloud_name == fleet or re.fullmatch(pattern, cloud_name) is not None

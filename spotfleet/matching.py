"""Tests of an offer against a need. Pure."""

from __future__ import annotations

from spotfleet.model import Market, Need, Offer


def matches(need: Need, offer: Offer) -> bool:
    """Return whether `offer` fits `need`, at any price."""
    market = Market.SPOT if need.use_spot else Market.ON_DEMAND
    return (offer.market is market
            and need.provider in ("", offer.provider)
            and need.region in ("", offer.region)
            and need.zone in ("", offer.zone)
            and need.instance_type in ("", offer.instance_type)
            and need.accelerator.casefold() in ("", offer.accelerator.casefold())
            and (not need.accelerator_count or (bool(offer.accelerator) and offer.slots == need.accelerator_count)))


def meets(need: Need, offer: Offer) -> bool:
    """Return whether `offer` fits `need` and its price limit (0: no limit). Reserved capacity has a price in any case.
    """
    return matches(need, offer) and (not need.max_micros_h or bool(offer.reserved)
                                     or offer.price_micros_h <= need.max_micros_h)

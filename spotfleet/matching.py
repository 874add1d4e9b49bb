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


def fits_size(need: Need, vcpus: float, memory_gib: float) -> bool:
    """Return whether a machine of this size fits `need`. A provider calls it for its types: an offer has no size."""
    return (need.min_vcpus <= vcpus and (not need.max_vcpus or vcpus <= need.max_vcpus)
            and need.min_memory_gib <= memory_gib and (not need.max_memory_gib or memory_gib <= need.max_memory_gib))


def meets(need: Need, offer: Offer) -> bool:
    """Return whether `offer` fits `need` and its price limit (0: no limit). Reserved capacity has a price in any case.
    """
    return matches(need, offer) and (not need.max_micros_h or bool(offer.reserved)
                                     or offer.price_micros_h <= need.max_micros_h)

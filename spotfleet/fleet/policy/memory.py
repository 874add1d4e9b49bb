"""What a fleet has seen of the spot market: spells in which hosts could be had, and in which not. Pure.

Little is seen at first, so some is believed: as if BELIEVED_LOSSES had been seen in BELIEVED_S, half of it available.
"""

from __future__ import annotations

from .values import Memory, Spell

KEPT = 256  # spells; more say little about the days to come, and a fleet may live for months
BELIEVED_LOSSES = 4
BELIEVED_S = 8 * 3600.0


def remember(memory: Memory, now: float, available: bool) -> Memory:
    """The memory after it was seen at `now` (Unix seconds) whether spot hosts could be had.

    A spell lasts until the opposite is seen. A sight that is older than the memory is left out.
    """
    spells = memory.spells
    if not spells:
        return Memory((Spell(available, now, now),))
    last = spells[-1]
    if now < last.until:
        return memory
    seen = Spell(last.available, last.since, now)
    if last.available == available:
        return Memory((*spells[:-1], seen))
    return Memory((*spells[:-1], seen, Spell(available, now, now))[-KEPT:])


def plenty(spot: int, room: int | None, hosts: int) -> bool:
    """Whether spot hosts can be had, as one word for many: at least half of the target is held, or could be."""
    return 2 * (spot + (hosts if room is None else room)) >= hosts


def losses_per_s(memory: Memory) -> float:
    """How often hosts could be had, and then not any more, per second of all times."""
    spells = memory.spells
    if not spells:
        return BELIEVED_LOSSES / BELIEVED_S
    lost = (len(spells) - (0 if spells[0].available else 1)) // 2
    return (lost + BELIEVED_LOSSES) / (spells[-1].until - spells[0].since + BELIEVED_S)


def goes_on_s(memory: Memory) -> float:
    """Seconds for which hosts are expected to be had from now on, if they can be had now: the mean of what was left of
    former spells when they were as old. It grows with the spell's age where there are many short and a few long ones.
    """
    spells = memory.spells
    age = spells[-1].until - spells[-1].since if spells else 0.0
    left, spent = 0.5 * BELIEVED_S + BELIEVED_LOSSES * age, BELIEVED_LOSSES
    for spell in spells[:-1]:
        if spell.available and spell.until - spell.since > age:
            left += spell.until - spell.since - age
            spent += 1
    return left / spent

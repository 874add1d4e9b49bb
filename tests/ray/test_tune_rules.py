"""Rules of elastic trials that need no Ray: sizes, growth, the keys of a search space."""

from __future__ import annotations

import random

from spotfleet.ray.tune.sizes import EXPIRES_S, Sizes, TrialClaim


def begun(atoms: int, *claims: TrialClaim) -> Sizes:
    sizes = Sizes(atoms)
    for claim in claims:
        sizes.claim(claim, 0.0)
    return sizes


def test_trials_begin_with_their_least_and_grow_as_wished():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 2))
    assert sizes.sizes() == {"a": 1, "b": 1}
    assert sizes.wish("a", 2) == 2 and sizes.wish("b", 9) == 2
    assert sizes.free == 0


def test_a_wish_that_exceeds_the_atoms_is_granted_once_they_are_free():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    assert sizes.wish("b", 2) == 2 and sizes.wish("a", 4) == 2
    sizes.leave(TrialClaim("b", 1, 4))
    assert sizes.sizes() == {"a": 4}


def test_atoms_that_one_trial_gives_up_go_to_another_in_the_same_call():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    sizes.wish("a", 3)
    assert sizes.wish_all({"b": 3, "a": 1}) == {"b": 3, "a": 1}


def test_a_trial_that_begins_takes_its_first_atoms_from_the_largest():
    sizes = begun(4, TrialClaim("a", 1, 4), TrialClaim("b", 1, 4))
    sizes.wish("a", 3)
    assert sizes.claim(TrialClaim("c", 1, 4), 0.0) == 1 and sizes.sizes() == {"a": 2, "b": 1, "c": 1}
    sizes.leave(TrialClaim("c", 1, 4))
    assert sizes.sizes() == {"a": 3, "b": 1}, "the wish counts still"


def test_trials_without_room_wait_in_their_order():
    sizes = begun(4, TrialClaim("a", 2, 4), TrialClaim("b", 2, 4), TrialClaim("c", 3, 4), TrialClaim("d", 1, 1))
    assert sizes.sizes() == {"a": 2, "b": 2, "c": 0, "d": 0}
    sizes.leave(TrialClaim("a", 2, 4))
    assert sizes.sizes() == {"b": 2, "c": 0, "d": 0}, "d would fit, and c has waited for longer"
    sizes.leave(TrialClaim("b", 1, 4))
    assert sizes.sizes() == {"c": 3, "d": 1}


def test_while_trials_are_held_none_begins_beside_others_and_one_begins_alone():
    sizes = begun(4, TrialClaim("a", 1, 4))
    sizes.hold(True)
    assert sizes.claim(TrialClaim("b", 1, 4), 0.0) == 0
    assert sizes.wish("a", 4) == 4, "it gets all atoms, and b takes none back"
    sizes.leave(TrialClaim("a", 1, 4))
    assert sizes.sizes() == {"b": 1}, "atoms would lie idle"
    sizes.claim(TrialClaim("c", 1, 4), 0.0)
    sizes.hold(False)
    assert sizes.sizes() == {"b": 1, "c": 1}


def test_lost_nodes_shrink_the_largest_trials_and_end_none():
    sizes = begun(6, TrialClaim("a", 1, 4), TrialClaim("b", 2, 2))
    sizes.wish("a", 4)
    sizes.atoms = 4
    sizes.claim(TrialClaim("b", 2, 2), 1.0)
    assert sizes.sizes() == {"a": 2, "b": 2}
    sizes.atoms = 1
    sizes.claim(TrialClaim("b", 2, 2), 2.0)
    assert sizes.sizes() == {"a": 1, "b": 2}


def test_a_new_holder_of_the_sizes_takes_them_from_the_claims():
    assert begun(4, TrialClaim("a", 1, 4, holds=3), TrialClaim("b", 1, 4, holds=1)).sizes() == {"a": 3, "b": 1}


def test_a_trial_without_a_claim_for_long_has_ended():
    sizes = begun(2, TrialClaim("a", 1, 2), TrialClaim("b", 1, 2))
    sizes.claim(TrialClaim("a", 1, 2), EXPIRES_S)
    sizes.expire(EXPIRES_S + 1)
    assert sizes.sizes() == {"a": 1}


def test_worker_seconds_add_up_over_the_runs_of_a_trial():
    """A paused trial and one whose coordinator was lost with its node go on in another run."""
    sizes = begun(2, TrialClaim("a", 1, 2, run="1", worker_s=5.0))
    sizes.claim(TrialClaim("a", 1, 2, run="2"), 1.0)
    assert sizes.spent_s("a") == 5.0
    sizes.leave(TrialClaim("a", 1, 2, run="1", worker_s=6.0))
    assert sizes.sizes() == {"a": 1}, "the lost coordinator's end arrives late"
    sizes.leave(TrialClaim("a", 1, 2, run="2", worker_s=2.0))
    assert sizes.spent_s("a") == 7.0 and sizes.sizes() == {}


def test_in_any_history_the_sum_stays_within_the_atoms_and_each_size_within_its_limits():
    draw = random.Random(7)
    for _ in range(300):
        sizes = Sizes(draw.randint(1, 8))
        claims: dict[str, TrialClaim] = {}
        for now in range(40):
            name = draw.choice("abcdef")
            match draw.randint(0, 3):
                case 0 | 1:
                    least = draw.randint(1, 3)
                    claims.setdefault(name, TrialClaim(name, least, least + draw.randint(0, 4)))
                    sizes.claim(claims[name], float(now))
                case 2:
                    sizes.wish(name, draw.randint(1, 8))
                case 3:
                    if claim := claims.pop(name, None):
                        sizes.leave(claim)
            found = sizes.sizes()
            assert sum(found.values()) <= sizes.atoms
            assert all(size == 0 or claims[n].least <= size <= claims[n].most for n, size in found.items())
            first = next((n for n, size in found.items() if size == 0), None)
            kept = sum(claims[n].least for n, size in found.items() if size)
            assert first is None or kept + claims[first].least > sizes.atoms, "room is never kept from one that waits"

"""When a host ends itself: never while a dispatcher is heard, and always when none ever comes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.agent.orphan import (
    GAP_S,
    SAVE_S,
    STORE_S,
    Life,
    Limits,
    Moment,
    Phase,
    Sight,
    Trainee,
    look,
    passed,
    unsaved,
)
from spotfleet.messages import Assignment, Checkpoint, Stage, WorkerReport

HOUR = Limits(orphan_after_s=3600.0)
QUIET, HEARD = Sight(heard=False), Sight(heard=True)
FIRST, SECOND = "f-1/0/1", "f-2/0/1"


def at(seconds: float, boot: str = "a") -> Moment:
    return Moment(boot, seconds)


def lived(sights: list[tuple[float, Sight]], limits: Limits = HOUR, life: Life | None = None) -> Life:
    """The life after these looks, each so many seconds after the one before."""
    life = life or Life(at(0.0))
    for seconds, sight in sights:
        life = look(life, replace(life.now, at=life.now.at + seconds), sight, limits)
    return life


def for_s(seconds: float, sight: Sight = QUIET) -> list[tuple[float, Sight]]:
    return [(1.0, sight)] * int(seconds)


def training(worker: str, rank: int, version: int = 10, checkpoint: int | None = None, generation: int = 3,
             stage: Stage = Stage.READY) -> Trainee:
    made = None if checkpoint is None else Checkpoint(checkpoint, "d", 1, 3, "/here")
    return Trainee(WorkerReport(worker, "job", stage, generation, version=version, checkpoint=made),
                   Assignment(3, rank, (FIRST, SECOND), "store"))


def test_an_hour_without_a_dispatcher_ends_a_host_that_has_nothing_to_save():
    assert lived(for_s(3599)).phase is Phase.HEARD
    life = lived(for_s(3603))
    assert (life.phase, life.why) == (Phase.OFF, "it has heard from no dispatcher for 3600 s (orphan_after)")


def test_a_word_from_a_dispatcher_at_any_time_before_off_makes_all_as_it_was():
    saving = lived(for_s(3600))
    storing = lived([*for_s(3601)])
    assert (saving.phase, storing.phase) == (Phase.SAVING, Phase.STORING)
    for life in (saving, storing):
        back = lived([(1.0, HEARD)], life=life)
        assert (back.phase, back.silent_s, back.why) == (Phase.HEARD, 0.0, "")
        assert lived(for_s(3598), life=back).phase is Phase.HEARD


def test_off_is_for_good():
    off = lived(for_s(3602))
    assert lived(for_s(10, HEARD), life=off).phase is Phase.OFF


def test_what_is_unsaved_and_then_unstored_is_waited_for_and_not_for_ever():
    busy, slow = Sight(False, unsaved="writes a checkpoint"), Sight(False, unstored="checkpoint 5")
    assert lived(for_s(3600 + SAVE_S - 1, busy)).phase is Phase.SAVING
    saved = lived(for_s(3600 + SAVE_S, busy))
    assert saved.phase is Phase.STORING
    assert lived(for_s(STORE_S - 1, slow), life=saved).phase is Phase.STORING
    assert lived(for_s(STORE_S, slow), life=saved).phase is Phase.OFF
    assert lived(for_s(2), life=saved).phase is Phase.OFF


def test_max_lifetime_ends_a_host_that_hears_its_dispatcher_all_the_time():
    limits = Limits(orphan_after_s=3600.0, lifetime_s=100.0)
    assert lived(for_s(99, HEARD), limits).phase is Phase.HEARD
    life = lived(for_s(102, HEARD), limits)
    assert (life.phase, life.why) == (Phase.OFF, "it is 100 s old and max_lifetime allowed 100 s")


def test_without_limits_a_host_never_ends_itself():
    assert lived(for_s(5000), Limits()).phase is Phase.HEARD


def test_an_agent_that_crashes_again_and_again_counts_the_time_between():
    life = Life(at(0.0))
    for start in range(0, 4000, 4):  # each remembers only what the one before it wrote at its start
        life = look(passed(life, at(float(start))), at(float(start)), QUIET, HOUR)
    assert life.phase is Phase.OFF


def test_a_machine_that_was_stopped_or_asleep_is_given_time_to_hear_its_dispatcher():
    life = lived(for_s(60, HEARD))
    woken = passed(life, at(60.0 + 8 * 3600))
    assert (woken.silent_s, woken.age_s) == (GAP_S, 60.0 + 8 * 3600)
    assert look(woken, woken.now, HEARD, HOUR).phase is Phase.HEARD


def test_a_reboot_begins_another_clock_and_forgives_nothing():
    life = lived(for_s(3500))
    booted = passed(life, at(20.0, boot="b"))
    assert (booted.silent_s, booted.age_s) == (3520.0, 3520.0)
    assert lived(for_s(82), life=booted).phase is Phase.OFF


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
                max_size=80), st.floats(1.0, 500.0))
def test_no_host_ends_in_silence_before_its_time_and_each_ends_when_none_ever_comes(looks, after_s):
    limits, life, last_heard, running, boots = Limits(orphan_after_s=after_s), Life(at(0.0)), 0.0, 0.0, 0
    for seconds, heard, unsaved_, unstored, reboot in looks:
        boots += reboot
        running += seconds
        now = at(seconds if reboot else life.now.at + seconds, boot=str(boots) if boots else "a")
        before = life.phase
        life = look(life, now, Sight(heard, "w" * unsaved_, "s" * unstored), limits)
        last_heard = running if heard else last_heard
        if life.phase is not Phase.HEARD and before is not Phase.OFF:
            assert not heard and running - last_heard >= after_s - 1e-6
    for _ in range(int(after_s + SAVE_S + STORE_S) + 3):
        life = look(life, replace(life.now, at=life.now.at + 1.0), Sight(False, "never", "never"), limits)
    assert life.phase is Phase.OFF


# ---- who waits for whom


def test_the_host_of_rank_0_waits_for_a_checkpoint_of_what_was_reached_when_it_was_asked():
    assert unsaved([training(FIRST, 0)], {FIRST: 10}) == f"{FIRST} writes a checkpoint"
    assert unsaved([training(FIRST, 0, version=12, checkpoint=9)], {FIRST: 10}) == f"{FIRST} writes a checkpoint"
    assert unsaved([training(FIRST, 0, version=12, checkpoint=10)], {FIRST: 10}) == ""


def test_a_host_without_rank_0_trains_on_until_its_group_breaks():
    assert unsaved([training(SECOND, 1)], {}) == (
        f"{SECOND} trains on until rank 0 on f-1 has its checkpoint")
    assert unsaved([training(SECOND, 1, generation=0)], {}) == ""


def test_other_ranks_beside_rank_0_are_saved_with_it():
    crew = [training(FIRST, 0, checkpoint=10), training("f-1/1/1", 1)]
    assert unsaved(crew, {FIRST: 10}) == ""


def test_a_script_that_only_has_its_rest_to_run_is_let_to_its_end():
    for stage in (Stage.FINISHED, Stage.STARTING):
        assert unsaved([training(FIRST, 0, stage=stage)], {}) == f"{FIRST} runs its script to the end"


def test_a_spare_and_one_that_waits_in_init_have_nothing_to_save():
    spare = Trainee(WorkerReport(FIRST, "job", Stage.READY), None)
    waiting = Trainee(WorkerReport(SECOND, "job", Stage.INIT), None)
    assert unsaved([spare, waiting], {}) == ""

"""When a host ends itself: never while a dispatcher is heard, and always when none ever comes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.agent.policy.orphan import (
    GAP_S,
    SAVE_S,
    STORE_S,
    Instant,
    Limits,
    LiveWorker,
    OrphanObservation,
    OrphanPhase,
    OrphanState,
    advance,
    unsaved,
    with_elapsed,
)
from spotfleet.protocol.messages import Assignment, Checkpoint, Stage, WorkerReport

HOUR = Limits(orphan_after_s=3600.0)
QUIET, HEARD = OrphanObservation(has_orders=False), OrphanObservation(has_orders=True)
FIRST, SECOND = "f-1/0/1", "f-2/0/1"


def at(seconds: float, boot: str = "a") -> Instant:
    return Instant(boot, seconds)


def lived(sights: list[tuple[float, OrphanObservation]], limits: Limits = HOUR,
          life: OrphanState | None = None) -> OrphanState:
    """The life after these looks, each so many seconds after the one before."""
    life = life or OrphanState(at(0.0))
    for seconds, observed in sights:
        life = advance(life, replace(life.now, at=life.now.at + seconds), observed, limits)
    return life


def for_s(seconds: float, observed: OrphanObservation = QUIET) -> list[tuple[float, OrphanObservation]]:
    return [(1.0, observed)] * int(seconds)


def training(worker: str, rank: int, version: int = 10, checkpoint: int | None = None, generation: int = 3,
             stage: Stage = Stage.READY) -> LiveWorker:
    made = None if checkpoint is None else Checkpoint(checkpoint, "d", 1, 3, "/here")
    return LiveWorker(WorkerReport(worker, "job", stage, generation, version=version, checkpoint=made),
                   Assignment(3, rank, (FIRST, SECOND), "store"))


def test_an_hour_without_a_dispatcher_ends_a_host_that_has_nothing_to_save():
    assert lived(for_s(3599)).phase is OrphanPhase.IN_CONTACT
    life = lived(for_s(3603))
    assert (life.phase, life.why) == (OrphanPhase.OFF, "it has heard from no dispatcher for 3600 s (orphan_after)")


def test_a_word_from_a_dispatcher_at_any_time_before_off_makes_all_as_it_was():
    saving = lived(for_s(3600))
    storing = lived([*for_s(3601)])
    assert (saving.phase, storing.phase) == (OrphanPhase.SAVING, OrphanPhase.STORING)
    for life in (saving, storing):
        back = lived([(1.0, HEARD)], life=life)
        assert (back.phase, back.silent_s, back.why) == (OrphanPhase.IN_CONTACT, 0.0, "")
        assert lived(for_s(3598), life=back).phase is OrphanPhase.IN_CONTACT


def test_off_is_for_good():
    off = lived(for_s(3602))
    assert lived(for_s(10, HEARD), life=off).phase is OrphanPhase.OFF


def test_what_is_unsaved_and_then_unstored_is_waited_for_and_not_for_ever():
    busy = OrphanObservation(False, unsaved="writes a checkpoint")
    slow = OrphanObservation(False, unstored="checkpoint 5")
    assert lived(for_s(3600 + SAVE_S - 1, busy)).phase is OrphanPhase.SAVING
    saved = lived(for_s(3600 + SAVE_S, busy))
    assert saved.phase is OrphanPhase.STORING
    assert lived(for_s(STORE_S - 1, slow), life=saved).phase is OrphanPhase.STORING
    assert lived(for_s(STORE_S, slow), life=saved).phase is OrphanPhase.OFF
    assert lived(for_s(2), life=saved).phase is OrphanPhase.OFF


def test_max_lifetime_ends_a_host_that_hears_its_dispatcher_all_the_time():
    limits = Limits(orphan_after_s=3600.0, lifetime_s=100.0)
    assert lived(for_s(99, HEARD), limits).phase is OrphanPhase.IN_CONTACT
    life = lived(for_s(102, HEARD), limits)
    assert (life.phase, life.why) == (OrphanPhase.OFF, "it is 100 s old and max_lifetime allowed 100 s")


def test_without_limits_a_host_never_ends_itself():
    assert lived(for_s(5000), Limits()).phase is OrphanPhase.IN_CONTACT


def test_an_agent_that_crashes_again_and_again_counts_the_time_between():
    life = OrphanState(at(0.0))
    for start in range(0, 4000, 4):  # each remembers only what the one before it wrote at its start
        life = advance(with_elapsed(life, at(float(start))), at(float(start)), QUIET, HOUR)
    assert life.phase is OrphanPhase.OFF


def test_a_machine_that_was_stopped_or_asleep_is_given_time_to_hear_its_dispatcher():
    life = lived(for_s(60, HEARD))
    woken = with_elapsed(life, at(60.0 + 8 * 3600))
    assert (woken.silent_s, woken.age_s) == (GAP_S, 60.0 + 8 * 3600)
    assert advance(woken, woken.now, HEARD, HOUR).phase is OrphanPhase.IN_CONTACT


def test_a_reboot_begins_another_clock_and_forgives_nothing():
    life = lived(for_s(3500))
    booted = with_elapsed(life, at(20.0, boot="b"))
    assert (booted.silent_s, booted.age_s) == (3520.0, 3520.0)
    assert lived(for_s(82), life=booted).phase is OrphanPhase.OFF


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
                max_size=80), st.floats(1.0, 500.0))
def test_no_host_ends_in_silence_before_its_time_and_each_ends_when_none_ever_comes(looks, after_s):
    limits, life, last_heard, running, boots = Limits(orphan_after_s=after_s), OrphanState(at(0.0)), 0.0, 0.0, 0
    for seconds, heard, unsaved_, unstored, reboot in looks:
        boots += reboot
        running += seconds
        now = at(seconds if reboot else life.now.at + seconds, boot=str(boots) if boots else "a")
        before = life.phase
        life = advance(life, now, OrphanObservation(heard, "w" * unsaved_, "s" * unstored), limits)
        last_heard = running if heard else last_heard
        if life.phase is not OrphanPhase.IN_CONTACT and before is not OrphanPhase.OFF:
            assert not heard and running - last_heard >= after_s - 1e-6
    for _ in range(int(after_s + SAVE_S + STORE_S) + 3):
        later = replace(life.now, at=life.now.at + 1.0)
        life = advance(life, later, OrphanObservation(False, "never", "never"), limits)
    assert life.phase is OrphanPhase.OFF


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
    spare = LiveWorker(WorkerReport(FIRST, "job", Stage.READY), None)
    waiting = LiveWorker(WorkerReport(SECOND, "job", Stage.INIT), None)
    assert unsaved([spare, waiting], {}) == ""

"""Time passes by the monotonic clock until the cloud or two hosts confirm what the wall clock shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.lifecycle import fleet_clock
from spotfleet.dispatcher.lifecycle.clock import MonotonicClock
from spotfleet.dispatcher.lifecycle.fleet_clock import CLOUD_S, BootMoment, FleetClock, MachineClocks
from spotfleet.dispatcher.lifecycle.lifetime import Idleness, reason_to_stop
from spotfleet.dispatcher.lifecycle.trusted_time import BOUND_S, ClockState, KnownTime, TrustedTime, hosts_time
from spotfleet.errors import SpotfleetError
from spotfleet.model import Autostop, FleetSpec

NOW, HOUR_S = 1_800_000_000.0, 3600.0
JUMPS = pytest.mark.parametrize("by_s", [20 * HOUR_S, -20 * HOUR_S], ids=["forward", "back"])


class Machine:
    """A machine with its clocks, a cloud, and a fleet whose dispatcher may be down."""

    def __init__(self, home: Path) -> None:
        self.home, self.true, self.wrong_s, self.boots, self.booted_at = home, NOW, 0.0, 0, NOW - 500.0
        self.stood_s = 0.0  # for this time the monotonic clock stood still: the machine was paused
        self.cloud_answers = True
        self.start(-float("inf"))

    def start(self, newest_at: float) -> FleetClock:
        self.clock = FleetClock(self.home, MachineClocks(lambda: self.true + self.wrong_s, self._mono, self._moment))
        self.clock.begin(newest_at)
        self.age = MonotonicClock(self.clock.unix(), self.clock.passed(), NOW, NOW)
        return self.clock

    def reboot(self) -> None:
        self.boots, self.booted_at, self.stood_s = self.boots + 1, self.true, 0.0

    def _mono(self) -> float:
        return self.true - self.booted_at - self.stood_s

    def _moment(self) -> BootMoment:
        return BootMoment(f"boot {self.boots}", self._mono())

    def cloud_time(self) -> float:
        if not self.cloud_answers:
            raise SpotfleetError("no answer")
        return self.true

    def let_pass(self, seconds: float) -> None:
        """Time passes, with the dispatcher's ticks."""
        self.true += seconds
        self.tick()

    def tick(self) -> None:
        self.clock.update()
        if self.clock.cloud_due(self):  # type: ignore[arg-type]
            self.clock.ask_cloud(self)  # type: ignore[arg-type]
        if self.clock.save_due:
            self.clock.save()

    def age_s(self) -> float:
        return self.age.age_s(self.clock.passed())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.tick()
    return made


NO_CLOCK = SimpleNamespace(name="ssh")  # a provider without a clock


# ---- while the dispatcher runs


@JUMPS
def test_a_wall_clock_that_is_set_while_the_dispatcher_runs_moves_neither_time_nor_age(machine, by_s):
    machine.let_pass(100.0)
    machine.wrong_s = by_s
    machine.let_pass(50.0)
    assert (machine.clock.unix(), machine.age_s(), machine.clock.take_shift()) == (NOW + 150.0, 150.0, 0.0)
    side = "ahead of" if by_s > 0 else "behind"
    assert machine.clock.why == (
        f"the dispatcher's clock is 20.0 h {side} the cloud's time, and is not used: set the clock of the dispatcher's "
        "machine, for instance with `sudo timedatectl set-ntp true`")
    machine.wrong_s = 0.5
    machine.let_pass(10.0)
    assert (machine.clock.unix(), machine.clock.why, machine.age_s()) == (NOW + 160.5, "", 160.0)


@JUMPS
def test_a_wall_clock_that_nobody_confirms_stays_unused_for_ever(machine, by_s):
    machine.cloud_answers, machine.wrong_s = False, by_s
    for _ in range(50):
        machine.let_pass(HOUR_S)
    assert (machine.clock.unix(), machine.age_s()) == (NOW + 50 * HOUR_S, 50 * HOUR_S)
    assert "is not used until the cloud or 2 hosts confirm it: if it is wrong, set the clock" in machine.clock.why


def test_a_machine_that_was_paused_learns_from_the_cloud_how_long(machine):
    machine.let_pass(100.0)
    machine.true, machine.stood_s = machine.true + 3 * HOUR_S, 3 * HOUR_S
    machine.tick()
    assert (machine.clock.unix(), machine.age_s()) == (NOW + 100.0 + 3 * HOUR_S, 100.0 + 3 * HOUR_S)
    assert (machine.clock.why, machine.clock.take_shift()) == ("", 0.0)


def test_small_steps_of_the_wall_clock_are_followed_but_never_far(machine):
    for _ in range(20):
        machine.wrong_s += BOUND_S * 0.9
        machine.cloud_answers = False
        machine.let_pass(60.0)
    assert abs(machine.clock.unix() - machine.true) <= BOUND_S


# ---- while it is down


@JUMPS
@pytest.mark.parametrize("rebooted", [False, True])
def test_a_wall_clock_that_is_set_while_no_dispatcher_runs_moves_neither_time_nor_age(machine, by_s, rebooted):
    machine.let_pass(100.0)
    newest = machine.clock.unix()
    machine.wrong_s, machine.true = by_s, machine.true + 600.0
    if rebooted:
        machine.reboot()
    machine.start(newest)
    assert machine.age_s() == 100.0 if rebooted else 700.0  # until the cloud has answered
    machine.let_pass(1.0)
    assert (machine.clock.unix(), machine.age_s(), machine.clock.take_shift()) == (NOW + 701.0, 701.0, 0.0)
    assert "the cloud's time, and is not used" in machine.clock.why


def test_on_the_same_boot_no_confirmation_is_needed(machine):
    machine.let_pass(100.0)
    machine.cloud_answers, machine.true = False, machine.true + 5 * HOUR_S
    machine.start(machine.clock.unix())
    assert (machine.clock.unix(), machine.age_s(), machine.clock.why) == (machine.true, 100.0 + 5 * HOUR_S, "")


def test_after_a_boot_a_long_absence_counts_once_the_cloud_confirms_it(machine):
    machine.let_pass(100.0)
    machine.true, machine.cloud_answers = machine.true + 5 * HOUR_S, False
    machine.reboot()
    machine.start(-float("inf"))
    machine.let_pass(1.0)
    assert (machine.age_s(), machine.clock.unix()) == (101.0, NOW + 101.0)
    assert "clock is 5.0 h ahead of the time that is known to have passed" in machine.clock.why
    machine.cloud_answers = True
    machine.let_pass(20.0)
    assert (machine.age_s(), machine.clock.unix(), machine.clock.why) == (5 * HOUR_S + 121.0, machine.true, "")


def test_restarts_that_nobody_confirms_add_up_to_the_age(machine):
    machine.cloud_answers, machine.wrong_s = False, 20 * HOUR_S
    for _ in range(10):
        machine.true += 7 * HOUR_S  # nothing runs
        machine.reboot()
        machine.start(-float("inf"))
        for _ in range(10):
            machine.let_pass(60.0)
    assert 10 * 540.0 <= machine.age_s() <= 10 * 600.0


def test_without_a_record_the_ledgers_newest_event_is_the_least_time(machine):
    (machine.home / "clock.json").unlink()
    machine.true += 4 * HOUR_S
    machine.reboot()
    machine.cloud_answers = False
    machine.start(NOW + 50.0)
    assert machine.clock.unix() == NOW + 50.0


@pytest.mark.parametrize("damage", ["truncated", "empty", "a digit flipped", "missing"])
def test_a_damaged_record_is_not_used(machine, damage):
    path = machine.home / "clock.json"
    whole = path.read_text()
    machine.true += 60.0
    if damage == "missing":
        path.unlink()
    else:
        flipped = whole.replace(str(json.loads(whole)["unix"]), "9" + str(json.loads(whole)["unix"])[1:])
        assert flipped != whole
        path.write_text({"truncated": whole[:20], "empty": "", "a digit flipped": flipped}[damage])
    machine.start(machine.true - 5.0)
    assert machine.clock.unix() == machine.true
    machine.tick()
    assert json.loads(path.read_text())["unix"] == machine.true


# ---- wrong from the beginning


@JUMPS
def test_a_clock_that_was_wrong_from_the_beginning_is_found_out_and_nothing_grew_older(tmp_path, by_s):
    machine = Machine(tmp_path)
    machine.wrong_s = by_s
    machine.start(-float("inf"))
    machine.let_pass(10.0)
    assert (machine.clock.unix(), machine.clock.take_shift(), machine.clock.take_shift()) == (machine.true, -by_s, 0.0)
    assert machine.clock.passed() == machine._mono()


# ---- hosts


@JUMPS
def test_two_hosts_that_agree_decide_where_the_cloud_has_no_clock(machine, by_s):
    machine.wrong_s = by_s
    machine.clock.update()
    mono = machine._mono()
    machine.clock.compare_hosts([(mono, machine.true)], NO_CLOCK)
    machine.clock.compare_hosts([(mono, machine.true), (mono, machine.true + HOUR_S)], NO_CLOCK)
    assert "until the cloud or 2 hosts confirm" in machine.clock.why
    machine.clock.compare_hosts([(mono, machine.true), (mono, machine.true + 1.0)], NO_CLOCK)
    assert "its hosts' time, and is not used" in machine.clock.why and machine.age_s() == 0.0


def test_hosts_wait_for_a_cloud_that_has_a_clock(machine):
    machine.cloud_answers, machine.wrong_s = False, 20 * HOUR_S
    machine.let_pass(1.0)

    def hosts() -> None:
        mono, clock = machine._mono(), machine.true + 20 * HOUR_S
        machine.clock.compare_hosts([(mono, clock), (mono, clock)], machine)  # type: ignore[arg-type]

    hosts()
    assert machine.clock.why
    machine.let_pass(CLOUD_S)
    hosts()
    assert machine.clock.why == "" and machine.clock.unix() == machine.true + 20 * HOUR_S


def test_clocks_that_arrived_before_the_doubt_decide_nothing(machine):
    machine.let_pass(10.0)
    early = machine._mono()
    machine.cloud_answers, machine.wrong_s = False, 20 * HOUR_S
    machine.let_pass(10.0)
    machine.clock.compare_hosts([(early, NOW + 10.0), (early, NOW + 10.0)], NO_CLOCK)
    assert "until the cloud or 2 hosts confirm" in machine.clock.why


def test_hosts_never_move_a_confirmed_time_back():
    time = TrustedTime(NOW, 0.0, KnownTime(NOW, exact=False, confirmed=True))
    time.update(NOW - 8 * HOUR_S, 1.0)
    time.confirm(NOW - 8 * HOUR_S, NOW - 8 * HOUR_S, 2.0, by_cloud=False)
    assert (time.unix(2.0), time.state) == (NOW + 2.0, ClockState.DOUBTED)
    time.confirm(NOW - 8 * HOUR_S, NOW - 8 * HOUR_S, 3.0, by_cloud=True)
    assert (time.unix(3.0), time.state) == (NOW - 8 * HOUR_S, ClockState.FOLLOWED)


def test_a_minority_of_hosts_decides_nothing():
    assert hosts_time([]) is hosts_time([NOW]) is None
    assert hosts_time([NOW, NOW + 5.0]) == NOW + 2.5
    assert hosts_time([NOW, NOW, NOW + HOUR_S, NOW + HOUR_S]) is None
    assert hosts_time([NOW, NOW, NOW + HOUR_S]) == NOW
    assert hosts_time([NOW - HOUR_S, NOW - 2 * HOUR_S, NOW, NOW, NOW + HOUR_S]) is None


# ---- limits


@JUMPS
@pytest.mark.parametrize("moment", ["running", "down", "down and rebooted"])
@pytest.mark.parametrize("spec", [FleetSpec("f", max_lifetime_s=2 * HOUR_S), FleetSpec("f", autostop=Autostop(1800.0))],
                         ids=["max_lifetime", "autostop"])
def test_a_limit_ends_the_fleet_when_its_time_has_passed_and_not_when_a_clock_is_set(machine, spec, moment, by_s):
    limit_s = spec.max_lifetime_s or spec.autostop.idle_s
    machine.let_pass(60.0)
    newest, machine.wrong_s = machine.clock.unix(), by_s
    if moment != "running":
        machine.true += 100.0
        if moment == "down and rebooted":
            machine.reboot()
        machine.start(newest)
    assert reason(machine, spec) == ""
    machine.let_pass(1.0)
    assert reason(machine, spec) == ""
    machine.let_pass(NOW + limit_s - machine.true - 1.0)
    assert reason(machine, spec) == ""
    machine.let_pass(2.0)
    assert reason(machine, spec) != ""


def reason(machine: Machine, spec: FleetSpec) -> str:
    """As `Dispatcher._end_if_due` asks for it."""
    unix, passed = machine.clock.unix(), machine.clock.passed()
    idle_from = unix - machine.age.idle_s(passed, working=False)
    return reason_to_stop(spec, Idleness(unix - machine.age.age_s(passed), 0, idle_from), unix)


def test_the_boot_of_this_machine_has_a_clock_that_goes_on():
    one, two = fleet_clock.boot_moment(), fleet_clock.boot_moment()
    assert one.boot == two.boot and one.boot_s <= two.boot_s

"""What a simulation of forty windows might find: made up, but complete and consistent."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.simulate.values.result import (
    PARTS,
    Action,
    PoolResult,
    SimulatedDecision,
    SimulationReport,
    Story,
    StrategyOutcome,
    Window,
)

HOUR = 3600.0
STRATEGIES = (("spotfleet", 0.42), ("on-demand only", 1.0), ("greedy", 0.55), ("Uniform Progress", 0.47),
              ("gang restart", 0.68))


POOL = PoolResult("us-east-1a_v100", "x/us-east-1a_v100.json", "aws", "us-east-1a", "p3.2xlarge", 300 * HOUR, 4, 0.63,
            918_000, 3_060_000, "the record")


def window(share: float, number: int) -> Window:
    micros = int(800_000_000 * min(1.0, share * (0.7 + 0.02 * number)))
    useful = micros * 9 // 10
    parts = (useful, micros - useful, 0, 0, 0)
    return Window("us-east-1a", number * 4 * HOUR, micros, micros // 2, micros - micros // 2,
                  number < 39 or share < 0.6, 58 * HOUR, 58 * HOUR, 192 * HOUR, 200 * HOUR, 150 * HOUR, 50 * HOUR,
                  3, 9, 2, tuple(zip(PARTS, parts, strict=True)))


def outcome(name: str, share: float) -> StrategyOutcome:
    return StrategyOutcome(name, name == "spotfleet", tuple(window(share, n) for n in range(40)), 100 * share, 0.85)


def story(name: str, share: float) -> Story:
    own = window(share, 15)
    hosts = tuple((at * HOUR, max(0, 4 - at % 3), int(at % 3 > 0), 4) for at in range(58))
    return Story(name, own, (SimulatedDecision(0.0, 4, 0, "spot hosts for all", "deadline"),
                             SimulatedDecision(20 * HOUR, 4, 2, "slack is used up: on demand what spot lacks",
                                               "deadline")),
                 (Action(0.0, "launch", "f-0", "0 of 4 hosts", "spot"),
                  Action(3 * HOUR, "notice", "f-0", "in 120 s", "spot"),
                  Action(3.03 * HOUR, "lost", "f-0", "taken", "spot"),
                  Action(4 * HOUR, "refused", "f-9", "no room", "spot")),
                 hosts, tuple((at * HOUR, 4 - at % 3) for at in range(58)),
                 tuple((at * HOUR, own.micros * at // 58) for at in range(59)),
                 tuple((at * HOUR, at / 58) for at in range(59)))


def report() -> SimulationReport:
    return SimulationReport(
        "bigmodel", (POOL,), True, 4, 48 * HOUR, 60 * HOUR, 60 * HOUR, 4 * HOUR, 180.0, 120.0,
        800_000_000, tuple(outcome(*s) for s in STRATEGIES), tuple(story(*s) for s in STRATEGIES),
        (("pause when a host dies", 0.06, "measured"),), ("disks are not counted",))


def without_windows() -> SimulationReport:
    return replace(report(), outcomes=(), stories=())

"""Parts of a host's boot, as its agent measures them."""

from __future__ import annotations

import time
from pathlib import Path

from spotfleet.agent import stages
from spotfleet.agent.stages import BootClock, measured
from spotfleet.model import BootStages

LENT = "lent b1 22.5\nready b1 132.5\n"


def test_a_lent_machine_reports_its_system_its_packages_and_its_agent():
    assert measured(LENT, "b1", started_s=133.0, now_s=151.5) == BootStages(None, None, 22.5, 110.0, 19.0)


def test_the_time_before_the_set_up_of_a_machine_of_ones_own_is_no_part_of_a_boot():
    own = "own b1 900000.5\nready b1 900010.5\n"
    assert measured(own, "b1", 900011.0, 900012.5) == BootStages(None, None, None, 10.0, 2.0)


def test_only_this_boot_counts_and_of_it_the_first_line_of_each_name():
    text = f"lent b0 5.0\nready b0 6.0\n{LENT}ready b1 500.0\nready b1 \n\udc80 odd\nready b1 1e9\n"
    assert measured(text, "b1", 133.0, 151.5) == BootStages(None, None, 22.5, 110.0, 19.0)
    assert measured(text, "b2", 133.0, 151.5) == BootStages(None, None, None, None, 18.5)


def test_the_parts_stay_as_they_were_when_the_agent_connected(tmp_path: Path, monkeypatch):
    (tmp_path / "stages").write_text(f"own {Path(stages._BOOT_ID).read_text().strip()} 1.0\n")
    clock = BootClock(tmp_path)
    before = clock.stages(connected=False)
    assert before.agent_s is not None and 0 <= before.agent_s < time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(stages, "_process_started_s", lambda: 0.0)
    waited = clock.stages(connected=False)
    assert waited.agent_s is not None and waited.agent_s > before.agent_s
    monkeypatch.setattr(stages, "_process_started_s", lambda: -1e6)
    assert clock.stages(connected=True) == waited

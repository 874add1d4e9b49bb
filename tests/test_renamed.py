"""Names from before the move of November 2026."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "renamed"


def renamed(*words: str, text: str = "") -> str:
    return subprocess.run([sys.executable, str(SCRIPT), *words], input=text, capture_output=True, text=True, check=True,
                          timeout=60).stdout


def test_a_file_or_class_is_found_by_its_old_name():
    assert "spotfleet/dispatcher/hosts.py: Seat -> spotfleet/dispatcher/hosts.py: AgentConnection" in renamed("Seat")
    assert renamed("fleet/fold.py") == "spotfleet/fleet/fold.py -> spotfleet/fleet/domain/state.py\n"
    assert "not in the table" in renamed("spotfleet/model.py")


def test_a_text_is_translated_by_whole_paths_and_the_classes_after_them():
    old = "`dispatcher/steward.py: Steward` asks fleet/fold.py, not x_fleet/fold.py. A Steward stays."
    new = "`dispatcher/policy.py: PolicyController` asks fleet/domain/state.py, not x_fleet/fold.py. A Steward stays."
    assert renamed(text=old) == new

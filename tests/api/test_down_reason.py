"""What `down` reports of a dispatcher that starts, fails and is started again."""

from __future__ import annotations

from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from spotfleet.api.lifecycle import down
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.transport.client import NOT_RUNNING

REFUSED = DispatcherUnreachable(f"[Errno 111] Connection refused: {NOT_RUNNING}")
REASON = DispatcherUnreachable("the dispatcher cannot start: the disk is read-only")


def test_down_gives_the_reason_that_came_between_two_failed_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(down, "PATIENCE_S", 0.3)
    monkeypatch.setattr(down, "POLL_S", 0.01)
    monkeypatch.setattr(down.cloud, "allow_access", lambda *_: None)
    answers = chain([REFUSED, REASON], repeat(REFUSED))

    def fail(**_: bool) -> None:
        raise next(answers)

    machine = SimpleNamespace(folder=SimpleNamespace(record=SimpleNamespace(reached=True)), provider=None,
                              cloud_name="f", locate=lambda: "https://127.0.0.1:1",
                              client=lambda *_, **__: SimpleNamespace(down=fail))
    with pytest.raises(SpotfleetError, match=f"this machine: {REASON}") as caught:
        down._fetch_results(machine, lambda _: None, discard=False, bring_checkpoints=False)  # type: ignore[arg-type]
    assert "--discard" in caught.value.hint

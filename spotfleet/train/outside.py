"""Count of optimizer steps outside `elastic.run`, for scripts that never enter it. It costs nothing inside.

Threads: the main thread calls `begin` and `end`; its optimizers call `_step_made`; the control thread reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from spotfleet.train.comm.group import Group


class OutsideSteps:
    """Steps of any torch optimizer on the thread that called `begin`, until `end`."""

    def __init__(self) -> None:
        self.steps = 0
        self._hook: Any = None
        self._thread = 0
        self._counted: tuple[int, int] | None = None  # steps, and the group's collectives by then, at the first report
        self._averages = False  # at least one collective per step since then
        self._first: Callable[[], None] = lambda: None

    def begin(self, first: Callable[[], None]) -> None:
        """Count from now on; call `first` after the first step."""
        if self._hook is None:
            self._thread, self._first = threading.get_ident(), first
            self._hook = register_optimizer_step_post_hook(self._step_made)

    def end(self) -> None:
        """Stop counting and forget the steps: those before training, to build an optimizer's state, are no work."""
        self.steps = 0
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def fields(self, group: Group | None, distributed: Iterable[Any]) -> dict[str, Any]:
        """Return the report's fields. `distributed`: the distributed optimizers."""
        steps = self.steps
        if steps == 0:
            return {}
        if group is not None:
            self._counted = self._counted or (steps, group.begun)
            before, begun = self._counted
            self._averages = group.begun - begun >= steps - before > 0
        return {"outside": steps, "together": bool(list(distributed)) or self._averages}

    def _step_made(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self.steps += 1
            if self.steps == 1:
                self._first()

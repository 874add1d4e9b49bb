"""Wakes everybody who waits for something to change."""

from __future__ import annotations

import asyncio


class Bell:
    """Waiters look at the state first and then wait, so a ring between two looks is never missed on one loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it rang within `timeout_s`."""
        return await rings(self._event, timeout_s)


async def rings(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` is set within `timeout_s`. Unlike wait_for, never loses a cancellation that comes with it."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True

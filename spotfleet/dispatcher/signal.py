"""Change notification for all waiters on one event loop."""

from __future__ import annotations

import asyncio


class Signal:
    """Notification of all waiters. They check the state first and then wait, so on one loop none is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a notification; return whether it came within `timeout_s`."""
        return await wait_set(self._event, timeout_s)


async def wait_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`; return whether it was set within `timeout_s`. Unlike `wait_for`, this never loses a
    cancellation that arrives at the same time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True

"""Outage of the cloud: its duration and error, in plain words for users. Pure."""

from __future__ import annotations

SLOW_S = 10.0  # an answer that takes longer is reported


class Outage:
    """Record of calls without an answer. Times are monotonic."""

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._since: float | None = None  # time of the first unanswered call
        self._error = ""

    def asked(self, now: float) -> None:
        self._since = now if self._since is None else self._since

    def answered(self) -> bool:
        """Record an answer; return whether it ended an outage."""
        news, self._since, self._error = self.lasts, None, ""
        return news

    def failed(self, error: str) -> bool:
        """Record a failure; return whether an outage began."""
        news, self._error = not self._error, error
        return news

    @property
    def lasts(self) -> bool:
        """True if a call has failed and none was answered since."""
        return bool(self._error)

    def why(self, now: float) -> str:
        """Return the outage in words; "" if there is none."""
        silent_s = now - self._since if self._since is not None else 0.0
        if not self._error and silent_s < SLOW_S:
            return ""
        return (f"{self._provider} has not answered for {silent_s:.0f} s" + (f" ({self._error})" if self._error else "")
                + ": hosts and training go on, nothing is launched or ended until it does")

"""Notice sources: plain HTTP to the metadata server of the host, no cloud SDK."""

from __future__ import annotations

from typing import Protocol

from spotfleet import plugins
from spotfleet.model import Notice


class NoticeSource(Protocol):
    def poll(self) -> Notice | None:
        """Return the notice in force now, with the seconds left; None if there is none or it was withdrawn.

        Takes at most about 2 s. Raises NoticeFormat for an answer it cannot read, OSError when no answer comes.
        """

    def tag(self, key: str) -> str:
        """Return the tag of this host that `Provider.tag` has set; "" if there is none. Time limit and errors are those
        of `poll`."""


def load(name: str, metadata_url: str) -> NoticeSource | None:
    """Return the notice source for hosts of provider `name`, by its plugin; None where it has none. UsageError for an
    unknown provider."""
    return plugins.load(name).notices(metadata_url)

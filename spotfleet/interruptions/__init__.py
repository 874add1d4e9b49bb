"""Notice sources: plain HTTP to the metadata server of the host, no cloud SDK."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from spotfleet.errors import UsageError
from spotfleet.model import Notice


class NoticeSource(Protocol):
    def poll(self) -> Notice | None:
        """The notice in force now, with the seconds left; None if there is none or it was withdrawn.

        Bounded to about 2 s. Raises NoticeFormat for an answer it cannot read, OSError when nobody answers.
        """

    def tag(self, key: str) -> str:
        """The tag of this host that `Provider.tag` has set; "" if there is none. Bounded and raises as `poll`."""


def load(name: str, metadata_url: str) -> NoticeSource:
    """The notice source for hosts of provider `name`, from the entry points of group spotfleet.interruptions."""
    found = {e.name: e for e in entry_points(group="spotfleet.interruptions")}
    if name not in found:
        raise UsageError(f"no interruption notices for provider '{name}'",
                         hint=f"sources exist for: {', '.join(sorted(found))}")
    return found[name].load()(metadata_url)

"""Notices and tags in the host's own folder, for machines over SSH. Standard library only.

    notice.json     {"ends_at": Unix seconds by the machine's own clock}; removing it withdraws the notice
    tags.json       {key: value}

Both are written to another name and renamed, so that a reader sees a whole file or none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from spotfleet.errors import NoticeFormat
from spotfleet.model import Notice

NOTICE, TAGS = "notice.json", "tags.json"


class FolderSource:
    """Notice source that reads files; `metadata_url` is the host's folder."""

    def __init__(self, metadata_url: str, now: Callable[[], float] = time.time) -> None:
        self._folder = Path(metadata_url)
        self._now = now

    def poll(self) -> Notice | None:
        """See `NoticeSource`."""
        data = self._read(NOTICE)
        if data is None:
            return None
        ends_at = data.get("ends_at")
        if isinstance(ends_at, bool) or not isinstance(ends_at, int | float):
            raise NoticeFormat(f"{self._folder / NOTICE}: ends_at: expected Unix seconds, got {ends_at!r}",
                               hint="watching on")
        return Notice(max(0.0, ends_at - self._now()), why="this machine is taken from the fleet")

    def tag(self, key: str) -> str:
        """See `NoticeSource`."""
        return str((self._read(TAGS) or {}).get(key, ""))

    def _read(self, name: str) -> dict[str, object] | None:
        """Read a file; None if it does not exist."""
        try:
            data = json.loads((self._folder / name).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise NoticeFormat(f"{self._folder / name}: cannot be read: {error}", hint="watching on") from None
        if not isinstance(data, dict):
            raise NoticeFormat(f"{self._folder / name}: expected a JSON object", hint="watching on")
        return data

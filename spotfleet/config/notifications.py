"""Section `notify` of the fleet file: a webhook, a command, and the events that are notified."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from spotfleet.config.document import Document
from spotfleet.model import NOTIFY_ON, NotifySpec
from spotfleet.words import did_you_mean

VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
EXPECTED = "expected an address such as https://hooks.slack.com/services/..., or $NAME of a variable that holds it"
DIGEST_CHARS = 16


class NotifyKeys(Protocol):
    webhook: str
    command: str
    events: tuple[str, ...]


def webhook(value: Any) -> Any:
    """Return the URL or $NAME. The message for a bad one does not repeat it: it is a secret."""
    if not isinstance(value, str) or not (VARIABLE.fullmatch(value) or is_url(value)):
        raise ValueError(EXPECTED)
    return value


def chosen(value: Any) -> Any:
    """Return the events' names."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise ValueError(f"expected a list of {', '.join(NOTIFY_ON)}, got {value!r}")
    for name in names:
        if name not in NOTIFY_ON:
            raise ValueError(f"expected some of {', '.join(NOTIFY_ON)}, got {name!r}{did_you_mean(name, NOTIFY_ON)}")
    return tuple(dict.fromkeys(names))


def resolve(document: Document, given: NotifyKeys | None, environ: Mapping[str, str]) -> str:
    """Return the webhook's URL; "" if there is none. What is wrong is noted as a problem of the document."""
    if given is not None and not (given.webhook or given.command):
        document.add(("notify",), "needs `webhook`, `command` or both")
    found = VARIABLE.fullmatch(given.webhook) if given is not None else None
    if found is None:
        return given.webhook if given is not None else ""
    url = environ.get(found[1], "")
    if not url:
        document.add(("notify", "webhook"), f"{found[1]} has no value in your environment; `export {found[1]}=...`")
    elif not is_url(url):
        document.add(("notify", "webhook"), f"the value of {found[1]}: {EXPECTED}")
    return url


def notify_spec(given: NotifyKeys | None, url: str) -> NotifySpec:
    if given is None:
        return NotifySpec()
    digest = hashlib.sha256(url.encode()).hexdigest()[:DIGEST_CHARS] if url else ""
    return NotifySpec(given.events, given.command, digest)


def is_url(text: str) -> bool:
    """Return whether this is an address on the web."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", text) and (
            parts.port is None or parts.port > 0)
    except ValueError:
        return False

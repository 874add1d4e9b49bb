"""JSON over HTTPS by GET, with retries where they help. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.version import __version__

TRIES = 5
WAIT_S = 1.0  # before the second try; doubles
LONGEST_S = 60.0  # longest pause that a server may request
TIMEOUT_S = 30.0
LARGEST = 64 << 20  # limit for the bytes of one answer
AGAIN = (408, 429, 500, 502, 503, 504)
REFUSED = (400, 401, 403)


def get(url: str, parameters: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None, *,
        sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Return the JSON object at `url`. Raises SpotfleetError after TRIES answers that are no JSON, are cut off, or
    request a later retry; NeedsPerson if the caller is refused. `headers` are never shown."""
    full = f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(parameters)}" if parameters else url
    message, where = "", urlsplit(url).hostname or url
    for attempt in range(TRIES):
        try:
            return _once(full, headers or {})
        except urllib.error.HTTPError as error:
            body = error.read(2000).decode(errors="replace")
            message = f"{where} answered {error.code} {error.reason}{_message(body)}"
            if error.code in REFUSED:
                raise NeedsPerson(message) from None
            if error.code not in AGAIN:
                raise SpotfleetError(message) from None
            wait_s = _asked_to_wait(error.headers.get("Retry-After", ""), attempt)
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = f"{where} gave no whole answer: {getattr(error, 'reason', None) or error}"
            wait_s = WAIT_S * 2**attempt
        if attempt + 1 < TRIES:
            sleep(wait_s)
    raise SpotfleetError(f"{message}, {TRIES} times in a row", hint="try again later, or look at the way to that host")


class _Stay(urllib.request.HTTPRedirectHandler):
    """Redirect handler that refuses other addresses: the request may contain credentials."""

    def redirect_request(self, *_args: Any, **_named: Any) -> None:
        return None


def _once(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("https", "http"):
        raise SpotfleetError(f"{url} is no address of a web server")
    request = urllib.request.Request(url, headers={"User-Agent": f"spotfleet/{__version__}",
                                                   "Accept": "application/json", **headers})
    with urllib.request.build_opener(_Stay).open(request, timeout=TIMEOUT_S) as answer:
        body = answer.read(LARGEST + 1)
    if len(body) > LARGEST:
        raise ValueError(f"more than {LARGEST} bytes came")
    found = json.loads(body)  # half an object is no JSON
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def _asked_to_wait(header: str, attempt: int) -> float:
    return min(float(header), LONGEST_S) if header.isdigit() else WAIT_S * 2**attempt


def _message(body: str) -> str:
    """Return ": MESSAGE" from the usual {"error": {"message": ...}} and {"Error": {"Message": ...}}."""
    try:
        data = json.loads(body)
        inner = data.get("error") or data.get("Error") or data
        text = inner if isinstance(inner, str) else inner.get("message") or inner.get("Message") or ""
        return f": {text[:200]}" if text else ""
    except (ValueError, AttributeError):
        return ""

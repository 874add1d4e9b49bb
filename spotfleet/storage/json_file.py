"""JSON files with a digest of their own, so that a changed digit counts as damage like a missing brace."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from spotfleet.codec import parse

DIGEST = "sha256"  # key of the digest in an object; an earlier release ignores it


def text_of(value: Any) -> str:
    """Return the text of a file: the JSON value and, if it is an object, its digest."""
    return json.dumps({**value, DIGEST: digest_of_json(value)} if isinstance(value, dict) else value, indent=1)


def read(path: Path) -> Any:
    """Read a file with the text of `text_of`, or one of an earlier release, without a digest. Raises ValueError for
    damage, which names no part of the content: it may be a secret."""
    try:
        value = parse(path.read_bytes())
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON, from line {error.lineno} on") from None
    if isinstance(value, dict) and (digest := value.pop(DIGEST, None)) is not None and digest != digest_of_json(value):
        raise ValueError("it has another content than was written")
    return value


def digest_of_json(value: Any) -> str:
    """Return the sha256 of a JSON value, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

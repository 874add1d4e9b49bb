"""Values of the fleet file. Each function returns the checked value or raises ValueError("expected ...")."""

from __future__ import annotations

import os
import re
from datetime import date
from decimal import Decimal
from typing import Any

from spotfleet import plugins
from spotfleet.storage.schemes import ANY_URL, EXAMPLES, SCHEMES
from spotfleet.words import did_you_mean

RAY_VERSION = re.compile(r"\d+\.\d+(\.(\d+|\*))?")
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*|/[^\s,:\\]+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
GIB = {"": 1.0, "M": 1 / 1024, "G": 1.0, "T": 1024.0}
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEAST_ORPHAN_S = 20.0  # below it, hosts would end themselves while their dispatcher is restarted


def duration_s(text: str) -> float:
    """Return the seconds of "90s", "10m", "2h", "1d" or "1h30m". Raises ValueError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise ValueError(f'expected a duration such as "90s", "10m" or "2h", got {text!r}')
    return sum(float(n) * UNIT_S[u] for n, u in parts)


def _wrong(expected: str, value: Any, more: str = "") -> ValueError:
    shown = value.isoformat() if isinstance(value, date) else repr(value)  # YAML parses 2026-12-01 as a date
    return ValueError(f"expected {expected}, got {shown}{more}")


def count(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong("a whole number of at least 1", value)
    return value


def whole(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong("a whole number of at least 0", value)
    return value


def growth(value: Any) -> Any:
    """Return ((from this epoch, number of workers), ...) for {0: 2, 30: 4} or "0:2,30:4"."""
    pairs = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, str) and re.fullmatch(r"\d+:\d+(,\s*\d+:\d+)*", value):
        pairs = [tuple(map(int, pair.split(":"))) for pair in value.split(",")]
    if not pairs or any(isinstance(n, bool) or not isinstance(n, int) for pair in pairs for n in pair):
        raise _wrong("EPOCH: WORKERS pairs such as {0: 2, 30: 4}", value)
    epochs = [epoch for epoch, _ in pairs]
    if epochs[0] != 0 or epochs != sorted(set(epochs)) or min(workers for _, workers in pairs) < 1:
        raise _wrong("epochs in order, 0 first, each with 1 or more workers", value)
    return tuple(pairs)


def positive(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise _wrong("a number of at least 0", value)
    return value


def flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _wrong("text", value, more="; put it in quotes" if isinstance(value, (int, float)) else "")
    return value


def name(value: Any) -> Any:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        near = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-") if isinstance(value, str) else ""
        raise _wrong("small letters, digits and '-', a letter first, at most 40", value,
                     more=f"; write {near}" if NAME.fullmatch(near) else "")
    if value.endswith("-d"):  # its hosts would share names with dispatchers of the fleet without the ending
        raise _wrong("a name that does not end in '-d'", value)
    return value


def duration(value: Any) -> Any:
    if not isinstance(value, str):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        raise _wrong('a duration such as "90s", "10m" or "2h"', value, more=f'; write "{value}s"' if number else "")
    return duration_s(value)


def orphan_after(value: Any) -> Any:
    """Return the seconds without a dispatcher after which a host ends itself; 0: never."""
    seconds = duration(value)
    if 0 < seconds < LEAST_ORPHAN_S:
        raise _wrong(f'at least "{LEAST_ORPHAN_S:g}s", or "0s" for never: a dispatcher that is restarted is away for '
                     "up to 12 s", value)
    return seconds


def deadline(value: Any) -> Any:
    """Return seconds from a job's submission. 0 is rejected: no job can meet it; leave the key out for no deadline."""
    seconds = duration(value)
    if not seconds:
        raise _wrong('a duration above 0, such as "60h" from a job\'s submission on', value)
    return seconds


def price(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise _wrong("US dollars per hour, above 0", value, _plain_number(value))
    return round(Decimal(str(value)) * 1_000_000)


def money(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise _wrong("US dollars, above 0", value, _plain_number(value))
    return round(Decimal(str(value)) * 1_000_000)


def _plain_number(value: Any) -> str:
    """Suggest the number in "$25", "25 dollars" and the like."""
    found = re.fullmatch(r"(?:US)?\$?\s*(\d+(?:\.\d+)?)\s*(?:\$|USD|dollars?)?(?:\s*/\s*h)?", value) \
        if isinstance(value, str) else None
    return f"; write {found[1]}" if found else ""


def work(value: Any) -> Any:
    """Return (seconds at full target, 0) for "48h", or (0, optimizer steps) for "100000 steps"."""
    steps = re.fullmatch(r"([1-9]\d*)\s*steps?", value) if isinstance(value, str) else None
    if steps:
        return 0.0, int(steps[1])
    try:
        seconds = duration_s(value) if isinstance(value, str) else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise _wrong('"48h" (at the full number of hosts) or "100000 steps"', value)
    return seconds, 0


def nodes(value: Any) -> Any:
    if isinstance(value, str) and (parts := re.fullmatch(r"(\d+)\s*\.\.\s*(\d+)", value)):
        return {"min": int(parts[1]), "max": int(parts[2])}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"min": value, "target": value, "max": value}
    if not isinstance(value, dict):
        raise _wrong('{min: 2, target: 3, max: 4}, or "2..4", or 3', value)
    return value


def amount(value: Any) -> Any:
    """Return (least, most) for 4, "4" or "4+"; 0 as the most is no limit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(\+?)", str(value)) if not isinstance(value, bool) else None
    if found is None or not float(found[1]):
        raise _wrong('a number such as 4, or "4+" for at least so many', value)
    return float(found[1]), 0.0 if found[2] else float(found[1])


def memory(value: Any) -> Any:
    """Return (least, most) in GiB for 32, "32+", "32GB+"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|M|G|T)(?:i?B)?(\+?)", str(value), re.I)
    if found is None or isinstance(value, bool) or not float(found[1]):
        raise _wrong('GiB such as 32, or "32+" for at least so many', value)
    gib = float(found[1]) * GIB[found[2].upper()]
    return gib, 0.0 if found[3] else gib


def disk_size(value: Any) -> Any:
    """Return whole GiB for 256, "256GB" or "1TB"."""
    least, most = memory(value)
    if least != most or least != int(least):
        raise _wrong("whole GiB such as 256", value)
    return int(least)


def accelerators(value: Any) -> Any:
    """Return [(name, count)] for "A100", "A100:8", {A100: 8} and lists of these."""
    if isinstance(value, dict) and value:
        return [(text(k), count(v)) for k, v in value.items()]
    if isinstance(value, list) and value:
        return [pair for item in value for pair in accelerators(item)]
    if isinstance(value, str) and (parts := re.fullmatch(r"([A-Za-z][\w-]*)(?::([1-9]\d*))?", value)):
        return [(parts[1], int(parts[2] or 1))]
    raise _wrong("NAME or NAME:COUNT such as A100:8, or a list of them", value)


def autostop(value: Any) -> Any:
    if value is False:
        return {}
    if isinstance(value, str):
        return {"idle_minutes": duration_s(value) / 60}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"idle_minutes": value}
    if not isinstance(value, dict):
        raise _wrong("{idle_minutes: 10, down: true}", value)
    return value


def providers(value: Any) -> Any:
    """Check one provider, or a list of clouds; returns their names joined."""
    if not isinstance(value, list):
        return provider(value)
    if not value:
        raise _wrong("a provider, or a list of clouds", value)
    if twice := next((v for v in value if value.count(v) > 1), ""):
        raise ValueError(f"{twice} is here twice")
    return plugins.JOINED.join(map(provider, value))


def provider(value: Any) -> Any:
    known = plugins.names()
    if value not in known:
        raise ValueError(f"unknown provider {value!r}; expected one of {', '.join(known)}{did_you_mean(value, known)}")
    return value


def infra(value: Any) -> Any:
    """Return (provider, region, zone) for "aws/us-east-1/us-east-1a"; "*" means any."""
    parts = text(value).split("/")
    if len(parts) > 3 or not all(parts):
        raise _wrong("PROVIDER/REGION/ZONE", value)
    if parts[0] != "*":
        provider(parts[0])
    return tuple("" if p == "*" else p for p in [*parts, "", ""][:3])


def variables(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("expected NAME: value pairs")  # no value in the message: it may be a secret
    for key, held in value.items():
        if not isinstance(key, str) or not VARIABLE.fullmatch(key) or key.startswith("SPOTFLEET_"):
            raise ValueError(f"expected the name of an environment variable, got {key!r}"
                             + ("; SPOTFLEET_ is reserved" if str(key).startswith("SPOTFLEET_") else ""))
        if held is not None and (isinstance(held, bool) or not isinstance(held, (str, int, float))):
            raise ValueError(f"{key}: expected text, or nothing to take it from your environment")
    return {k: v if v is None else str(v) for k, v in value.items()}


def mounts(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _wrong(f"NAME-IN-WORKDIR: LOCAL-PATH pairs, or NAME-IN-WORKDIR: {EXAMPLES[0]}", value)
    for name, source in value.items():
        _target(name)
        expected = f"the path of a local file or folder, or {ANY_URL}"
        if not isinstance(source, str) or not source:
            raise _wrong(expected, source)
        if "://" in source:
            _bucket(source, expected)
    found = {os.path.normpath(k): v for k, v in value.items()}
    for name, source in found.items():
        if "://" in source and name == ".":
            raise _wrong("a name inside the working directory", name, more=f"; {source} gets a folder of its own there")
    return found


def _target(name: Any) -> None:
    expected = "a name inside the working directory, or a path such as /data or ~/data"
    if not isinstance(name, str) or not name or ".." in name.split("/") or not name.isprintable():
        raise _wrong(expected, name)
    if os.path.normpath(name) in ("/", "//", "~") or (name.startswith("~") and not name.startswith("~/")):
        raise _wrong(expected, name, "; a whole folder such as that is never replaced")


def ray(value: Any) -> Any:
    """Return a section; `ray: true` is one without keys."""
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise _wrong("true, or {version: 2.60.*, object_store: 0.1, port: 6379}", value)
    return value


def ray_version(value: Any) -> str:
    found = str(value) if isinstance(value, (str, float, int)) and not isinstance(value, bool) else ""
    if not RAY_VERSION.fullmatch(found):
        raise _wrong("a version of Ray such as 2.60.0 or 2.60.*", value)
    return found


def object_store(value: Any) -> float:
    """Return a share of a host's memory."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 0.8:
        raise _wrong("a share of each host's memory, more than 0 and at most 0.8", value)
    return float(value)


def container(value: Any) -> Any:
    """Return a section, also for an image alone."""
    if isinstance(value, str):
        return {"image": value}
    if not isinstance(value, dict):
        raise _wrong("an image such as pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime, or {image: ..., mounts: ...}",
                     value)
    return value


def image(value: Any) -> Any:
    found = value.removeprefix("docker:") if isinstance(value, str) else ""
    if not IMAGE.fullmatch(found):
        raise _wrong("an image such as pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime, or the absolute path of a folder "
                     "that holds a root file system", value)
    return found


def host_mounts(value: Any) -> Any:
    """Check [FOLDER[:TARGET][:ro]]."""
    if not isinstance(value, list):
        raise _wrong("a list of the hosts' folders, such as [/mnt/data, \"/mnt/models:/models:ro\"]", value)
    for one in value:
        if not isinstance(one, str) or not re.fullmatch(r"/[^:,\s]*(:/[^:,\s]*)?(:ro)?", one):
            raise _wrong("absolute paths as FOLDER, FOLDER:TARGET or either with :ro at its end", one)
    return tuple(value)


def mounted(value: Any) -> Any:
    """Check {target: URL of a bucket}."""
    found = mounts(value)
    for target, source in found.items():
        if "://" not in source:
            raise _wrong(f"{target}: {ANY_URL}", source)
    return found


def _bucket(value: str, expected: str) -> None:
    scheme, _, rest = value.partition("://")
    if scheme not in SCHEMES:
        raise _wrong(expected, value, did_you_mean(scheme, list(SCHEMES)))
    bucket, _, prefix = rest.partition("/")
    if not BUCKET.fullmatch(bucket):
        raise _wrong(expected, value, f"; {bucket!r} is no name of a {SCHEMES[scheme].bucket.lower()}")
    if any(part in ("", ".", "..") for part in prefix.rstrip("/").split("/")) and prefix:
        raise _wrong(expected, value, "; a prefix is of names with / between them")


def target(value: Any) -> Any:
    expected = ("the absolute path of a folder that outlives the dispatcher, such as a mounted file system, or "
                f"{ANY_URL}")
    if not isinstance(value, str):
        raise _wrong(expected, value)
    scheme, is_url, rest = value.partition("://")
    if not is_url:
        if value and not value.startswith("/"):
            raise _wrong(expected, value)
        return os.path.normpath(value) if value else ""
    if scheme not in SCHEMES:
        more = {"file": f"; write /{rest.strip('/')}", "memory": "; memory ends with the process that wrote to it"}
        raise _wrong(expected, value, more.get(scheme) or did_you_mean(scheme, list(SCHEMES)))
    expected, bucket, *prefix = [f"{scheme}://{SCHEMES[scheme].bucket}/PREFIX", *rest.rstrip("/").split("/")]
    if not BUCKET.fullmatch(bucket):
        raise _wrong(expected, value, f"; {bucket!r} is no name of a {SCHEMES[scheme].bucket.lower()}")
    if not all(re.fullmatch(r"[A-Za-z0-9_.=+@-]+", part) and part not in (".", "..") for part in prefix):
        raise _wrong(expected, value, "; a prefix is of letters, digits and ._=+@-, with / between them")
    return "/".join([f"{scheme}://{bucket}", *prefix])


def tags(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise _wrong("NAME: text pairs", value)
    return value

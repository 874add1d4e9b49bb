"""`python fetch.py HOME NAME SHA256`: fetch the wheel to HOME/wheel/NAME. Run by the machine's own Python.

Without SPOTFLEET_WHEEL_URL it comes from the dispatcher in HOME/boot.json, by digest and with the host's token, over
TLS of the fleet's own authority. Only the digest counts. Retried with a back-off until LIMIT_S are over; then one line
gives the reason of the failure.

`python fetch.py --failed HOME HOST WHY [broken]`: report to the dispatcher that the machine cannot become a host.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

LIMIT_S, SILENCE_S = 300.0, 15.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 5.0
MOST_BYTES = 64 << 20
REPORTS = 3
# a retry gives the same answer; 401 to 404 may end when the dispatcher knows us or the wheel
HOPELESS = {400, 405, 426}


def main() -> int:
    if sys.argv[1] == "--failed":
        return report(*sys.argv[2:])
    home, name, digest = sys.argv[1:]
    limit_s = float(os.environ.get("SPOTFLEET_FETCH_S", LIMIT_S))
    request, context = _request(Path(home), digest, os.environ.get("SPOTFLEET_WHEEL_URL", ""))
    end, backoff_s = time.monotonic() + limit_s, FIRST_BACKOFF_S
    while True:
        try:
            data = _get(request, context, end)
        except urllib.error.HTTPError as error:
            why, hopeless = f"it answers {error.code} {error.reason}", error.code in HOPELESS
        except (OSError, http.client.HTTPException) as error:
            why = str(getattr(error, "reason", "") or error) or type(error).__name__
            hopeless = isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)
        else:
            if (found := hashlib.sha256(data).hexdigest()) == digest:
                return _put(Path(home, "wheel"), name, data)  # a full disk is not retried: bootstrap.sh reports it
            why, hopeless = f"what came has digest {found}, not {digest}", True
        left_s = end - time.monotonic()
        if hopeless or left_s < backoff_s:
            print(f"cannot fetch the code from {request.full_url.partition('?')[0]}: {why}", file=sys.stderr)
            return 1
        time.sleep(backoff_s)
        backoff_s = min(LAST_BACKOFF_S, backoff_s * 2)


def report(home: str, host: str, why: str, broken: str = "") -> int:
    """Report why this machine cannot become a host; tried REPORTS times."""
    request, context = _dispatcher(Path(home), f"/v1/hosts/{host}/failed")
    request.data = json.dumps({"why": why, "broken": bool(broken)}).encode()
    request.add_header("Content-Type", "application/json")
    for left in reversed(range(REPORTS)):
        try:
            _get(request, context, time.monotonic() + SILENCE_S)
            return 0
        except (OSError, http.client.HTTPException) as error:
            print(f"cannot report the failure to {request.full_url}: {error}", file=sys.stderr)
        time.sleep(LAST_BACKOFF_S if left else 0.0)
    return 1


def _request(home: Path, digest: str, url: str) -> tuple[urllib.request.Request, ssl.SSLContext | None]:
    if url:
        return urllib.request.Request(url), None  # the system's authorities, its proxies
    return _dispatcher(home, f"/v1/bundles/{digest}")


def _dispatcher(home: Path, path: str) -> tuple[urllib.request.Request, ssl.SSLContext]:
    boot = json.loads((home / "boot.json").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # this authority signs only the dispatcher
    context.load_verify_locations(cadata=boot["ca"])
    headers = {"Authorization": f"Bearer {boot['token']}"}
    return urllib.request.Request(f"{boot['dispatcher'].rstrip('/')}{path}", headers=headers), context


def _get(request: urllib.request.Request, context: ssl.SSLContext | None, end: float) -> bytes:
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)] if context else []
    out = bytearray()
    with urllib.request.build_opener(*handlers).open(request, timeout=SILENCE_S) as answer:
        said = int(answer.headers.get("Content-Length") or -1)
        while chunk := answer.read(1 << 16):
            out += chunk
            if len(out) > MOST_BYTES:
                raise OSError(f"more than {MOST_BYTES >> 20} MiB came")
            if time.monotonic() > end:
                raise TimeoutError(f"too slow: {len(out) >> 10} KiB came in time")
    if len(out) < said:
        raise OSError(f"cut off after {len(out)} of {said} bytes")
    return bytes(out)


def _put(folder: Path, name: str, data: bytes) -> int:
    folder.mkdir(mode=0o700, exist_ok=True)
    part = folder / f".{name}.{os.getpid()}"
    try:
        part.write_bytes(data)
        part.replace(folder / name)
    finally:
        part.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A real headless Chromium, spoken to over two pipes (Chrome DevTools Protocol). Nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
         "--disable-extensions", "--hide-scrollbars", "--force-device-scale-factor=1", "--password-store=basic",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe")
ANSWER_S = 30.0
# It reads descriptor 3 and writes to 4, whichever numbers ours have.
WIRE = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for n, fd in zip((3, 4), ours): os.dup2(fd, n)
os.execv(sys.argv[3], sys.argv[3:])
"""


def found() -> str | None:
    """Where a Chromium is, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one new Chromium. Every request that the page makes is kept in `requests`."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []  # what the page's own policy has refused, and other complaints of its console
        self._last = 0
        self._rest = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", WIRE, str(theirs_in), str(theirs_out), found() or "chromium", *FLAGS,
             f"--user-data-dir={folder / 'profile'}", f"--log-net-log={folder / 'net.json'}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # it ends when nobody speaks to it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, path: Path | str, *, width: int, dark: bool = False) -> None:
        """Show a file or an address on a screen of that width, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", media="screen",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        self._until("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, height: int | None = None) -> bytes:
        """A PNG of the whole page, or of its upper part."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip,
                                          captureBeyondViewport=True)["data"])
        path.write_bytes(data)
        return data

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _until(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._rest:
            poll = select.poll()
            poll.register(self._in, select.POLLIN)
            assert poll.poll(1000 * max(0.0, deadline - time.monotonic())), "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])
        return message


def requests_on_the_net(folder: Path) -> list[str]:
    """URLs of other machines that a browser which has ended had asked for, by its own log of the net."""
    text = (folder / "net.json").read_text().rstrip().rstrip(",")
    try:
        log = json.loads(text)
    except json.JSONDecodeError:  # it was ended before it could close its log
        log = json.loads(text + "]}")
    urls = {e.get("params", {}).get("url", "") for e in log["events"]}
    return sorted(u for u in urls if u.split(":")[0] in ("http", "https", "ws", "wss", "ftp"))

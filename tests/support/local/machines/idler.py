"""What an emulated host runs in these tests: `python -m idler --home DIR`. Files in DIR tell it what to do.

Starts two children, one in a session of its own, and writes all pids and its environment to DIR/born.json. Exits
with the status in DIR/exit when that appears; says when it gets SIGTERM, and ignores it where DIR/stubborn is. Where
DIR/hide is it starts a third child, which bears no mark in its environment either.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

home = Path(sys.argv[sys.argv.index("--home") + 1])


def asked_to_end(number, frame):
    print("asked to end", flush=True)
    if not (home / "stubborn").exists():
        sys.exit(0)


signal.signal(signal.SIGTERM, asked_to_end)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
sleep = [sys.executable, "-S", "-c", deaf]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
if (home / "hide").exists():
    children.append(subprocess.Popen(sleep, start_new_session=True, env={}))
born = {"pid": os.getpid(), "children": [c.pid for c in children], "env": dict(os.environ)}
(home / "born.new").write_text(json.dumps(born))
(home / "born.new").replace(home / "born.json")
print("born", flush=True)
while True:
    if (home / "exit").exists():
        text = (home / "exit").read_text()
        (home / "exit").unlink()
        sys.stdout.flush()
        os._exit(int(text))
    time.sleep(0.01)

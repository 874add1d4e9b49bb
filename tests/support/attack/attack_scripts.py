"""Scripts that the attacked fleets run."""

NOTING = '''
# A short job. Each process notes its start and its end in a file on this machine, one line each in one write.
import os, sys, time
key, lasts_s, notes = sys.argv[1], float(sys.argv[2]), sys.argv[3]

def note(word):
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{word} {key}\\n".encode())
    os.close(file)

note("start")
for number in range(int(lasts_s / 0.1)):
    print(f"line {number} of {key}", flush=True)
    time.sleep(0.1)
with open(os.path.join(os.environ["SPOTFLEET_OUTPUT"], "result.txt"), "w") as out:
    out.write(f"result of {key}\\n" * 100)
print("last line of", key, flush=True)
note("end")
'''

WAITING = '''
import sys, time
print("begun", flush=True)
time.sleep(float(sys.argv[1]))
'''


def logged(key: str, lasts_s: float) -> str:
    """Return the whole output of NOTING."""
    lines = [f"line {number} of {key}\n" for number in range(int(lasts_s / 0.1))]
    return "".join([*lines, f"last line of {key}\n"])

ODD_OUTPUTS = r'''
# Prints the files of its working directory, then leaves outputs of every odd kind.
import os, socket, sys

for folder, _, files in os.walk("."):
    for name in files:
        path = os.path.join(folder, name)
        text = open(path, errors="replace").read(40) if os.path.isfile(path) else ""
        kind = f"link, {text!a}" if os.path.islink(path) else "file"
        print(ascii(name), kind, flush=True)
out = os.environ["SPOTFLEET_OUTPUT"]
for name in ("plain.txt", "<script>", "new\nline", "esc\x1b[31mred", "-rf", "...", "..hidden", "x" * 255, "ledger.db",
             os.fsdecode(b"bad\xff\xfe"), "a\\..\\b"):
    with open(os.path.join(out, name), "w") as file:
        file.write("x")
os.symlink("/etc/passwd", os.path.join(out, "link-out"))
os.symlink("..", os.path.join(out, "link-up"))
os.mkfifo(os.path.join(out, "pipe"))
os.chdir(out)
with socket.socket(socket.AF_UNIX) as server:
    server.bind("socket")
os.link("plain.txt", "hard")
'''

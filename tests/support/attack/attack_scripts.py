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

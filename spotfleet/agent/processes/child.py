"""Worker process from its fork to its end: runs the user's script or command and writes its result to a file.

    zygote --fork--> begin: session of its own, dies with the zygote, log as stdout and stderr
                       |-- settings that only a fresh interpreter reads? exec this module, then
                     main: environment, working folder, script or command, exit file, os._exit

The process leads a session, so that every process it starts can be found and ended with it.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.agent.processes.entered import signal_script, start_script
from spotfleet.protocol.messages import dump, load
from spotfleet.storage import atomic

ERROR_BYTES = 8192
CLEANUP_S = 10.0  # limit of the runtime's shutdown and atexit functions after the script
_PR_SET_PDEATHSIG = 1
_READ_AT_START = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_")
_READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS"}  # `main` applies these itself
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ChildSpec:
    """One process. Travels through a socket or an anonymous file: `env` holds secrets."""

    id: str
    cwd: str
    log: str
    env: dict[str, str] = field(default_factory=dict, repr=False)  # complete; nothing else is inherited
    argv: tuple[str, ...] = ()  # a Python script and its arguments
    run: str = ""  # a shell command, when argv is empty
    exit_file: str = ""  # file of the `WorkerResult`; "": only the exit status matters
    fresh: bool = False  # start a new interpreter
    inside: tuple[str, ...] = ()  # what comes in front of a command that enters a container, where `run` runs


@dataclass(frozen=True)
class WorkerResult:
    """Result of the script as it reported it. Missing when a signal ended it."""

    done: bool = False
    error: str = ""
    blame_peer: bool = False
    blame_host: bool = False


def needs_fresh_interpreter(envs: dict[str, str]) -> bool:
    """Return whether the user sets variables that Python, torch or the C library read only when they start."""
    return any(k.startswith(_READ_AT_START) and k not in _READ_LATER for k in envs)


def die_with_parent(signum: int) -> None:
    if _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def begin(spec: ChildSpec, parent: int, close: tuple[int, ...], fresh: bool = False) -> None:
    """Turn a process just forked from the zygote `parent` into a worker. Does not return."""
    os.setsid()
    # A shell's children would outlive it: its runner gets a chance to end them (see _Shell).
    die_with_parent(signal.SIGKILL if spec.argv else signal.SIGTERM)
    _reset_signals()
    for fd in close:
        os.close(fd)
    _redirect(spec.log)
    if os.getppid() != parent:  # the zygote died before prctl
        os._exit(1)
    if spec.argv and (spec.fresh or fresh):
        _exec_fresh(spec)
    main(spec)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True, write_through=True)  # as PYTHONUNBUFFERED=1 would have done
    sys.stderr.reconfigure(line_buffering=True, write_through=True)


def _exec_fresh(spec: ChildSpec) -> None:
    fd = os.memfd_create("spotfleet-child", 0)  # inherited; never on a disk, never in argv
    os.write(fd, dump(spec).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    os.execve(sys.executable, [sys.executable, "-m", "spotfleet.agent.processes.child", str(fd)], spec.env)


def main(spec: ChildSpec) -> None:
    """Run the script or command of `spec` in this process, and end the process."""
    if not spec.inside:
        os.environ.clear()
        os.environ.update(spec.env)
    faulthandler.enable()
    if spec.argv:
        faulthandler.register(signal.SIGUSR2)  # the agent requests stacks of a hang; a script may rebind it
    try:
        os.chdir(spec.cwd)
        result, code = _shell(spec).wait() if not spec.argv else _script(spec)
    except OSError as error:
        print(f"spotfleet: {error}", file=sys.stderr)
        result, code = WorkerResult(error=str(error)), 1
    _leave(spec, result, code)


def _script(spec: ChildSpec) -> tuple[WorkerResult, int]:
    script = os.path.abspath(spec.argv[0])
    if not os.path.isfile(script):
        text = f"script '{spec.argv[0]}' is not in the shipped directory"
        print(f"spotfleet: {text}", file=sys.stderr)
        return WorkerResult(error=text), 2
    _prepare_interpreter(script, spec.argv)
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, sys.modules["__main__"].__dict__)
        result, status = WorkerResult(done=True), 0
    except SystemExit as leave:
        result, status = _system_exit(leave)
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything; it becomes the result
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        text = "".join(traceback.format_exception(error))
        result, status = WorkerResult(error=cut(text), blame_peer=bool(getattr(error, "blame_peer", False))), 1
    if result.done:
        threading._shutdown()  # a script ends after its non-daemon threads; a failure does not wait
    return result, status


def _prepare_interpreter(script: str, argv: tuple[str, ...]) -> None:
    """Set up the interpreter as `python SCRIPT ARGS` would have; it was started before this worker."""
    sys.argv = list(argv)
    started_in = sys.path[0] if sys.path else ""  # the zygote's own entry; not for the user's script
    user_paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [os.path.dirname(script), *user_paths] + [
        p for p in sys.path if p != started_in and p not in user_paths]
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = script, __builtins__
    sys.modules["__main__"] = module
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed()  # otherwise all forks draw the same numbers
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # as at its import, which came before the fork
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))


def _system_exit(leave: SystemExit) -> tuple[WorkerResult, int]:
    if leave.code is None or leave.code == 0:
        return WorkerResult(done=True), 0
    if isinstance(leave.code, int):
        return WorkerResult(error=f"the script left with sys.exit({leave.code})"), leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return WorkerResult(error=cut(f"the script left with: {leave.code}")), 1


class _Shell:
    """Runner of `bash -c COMMAND` as a child in our session. It forwards SIGTERM; a dead zygote ends all at once."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._zygote = os.getppid()
        self._asked = False
        signal.signal(signal.SIGTERM, self._terminate)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", self._command], stdin=subprocess.DEVNULL)

    def _terminate(self, *_: object) -> None:
        if os.getppid() != self._zygote:
            self._send(signal.SIGKILL)
        if not self._asked:  # the group includes this process
            self._asked = True
            self._send(signal.SIGTERM)

    def _send(self, signum: int) -> None:
        os.killpg(0, signum)

    def wait(self) -> tuple[WorkerResult, int]:
        code = self._process.wait()
        if code == 0:
            return WorkerResult(done=True), 0
        how = f"was ended by {_signal(-code)}" if code < 0 else f"exited with code {code}"
        return WorkerResult(error=cut(f"command {how}: {self._command.strip()}")), code if code > 0 else 128 - code


class _EnteredShell(_Shell):
    """A shell command in a container, by a client of its engine. The client's group has no process of the command."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        super().__init__(spec.run)

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        process = subprocess.Popen([*spec.inside, "sh"], stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(start_script(spec.run, spec.env, spec.cwd, spec.log).encode(errors="surrogateescape"))
        return process

    def _send(self, signum: int) -> None:
        script = signal_script(self._spec.log, signum)
        subprocess.run([*self._spec.inside, "sh", "-c", script], stdin=subprocess.DEVNULL, check=False)
        if signum == signal.SIGKILL:
            os.killpg(0, signum)


def _shell(spec: ChildSpec) -> _Shell:
    return _EnteredShell(spec) if spec.inside else _Shell(spec.run)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cut(text: str) -> str:
    """Cut `text` to ERROR_BYTES of UTF-8. The middle is dropped: the end of a traceback is the most useful part."""
    data = text.encode(errors="backslashreplace")  # a lone surrogate, as in the name of an odd file
    if len(data) <= ERROR_BYTES:
        return data.decode()
    head, tail = data[:1024], data[-(ERROR_BYTES - 1024 - 16):]
    return head.decode(errors="ignore") + "\n[...]\n" + tail.decode(errors="ignore")


def _leave(spec: ChildSpec, result: WorkerResult, code: int) -> None:
    """Write the result, run the shutdown functions and end the process, within CLEANUP_S."""
    threading.Thread(target=_give_up, args=(code,), daemon=True).start()
    if spec.exit_file:
        partial = f"{spec.exit_file}.part"
        Path(partial).write_text(dump(result))
        atomic.rename(Path(partial), Path(spec.exit_file), sync=False)  # read by this host, which goes on
    for last in (_shut_runtime_down, atexit._run_exitfuncs):
        try:
            last()
        except BaseException:  # noqa: BLE001 - the worker has ended; errors of its clean-up belong in its log
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as in Python: a closed or full log must not look like success
    os._exit(code)


def _shut_runtime_down() -> None:
    runtime = sys.modules.get("spotfleet.train")
    if runtime is not None and "torch" in sys.modules:  # without torch it cannot have been used
        runtime.shutdown()


def _give_up(code: int) -> None:
    threading.Event().wait(CLEANUP_S)
    print(f"spotfleet: clean-up took more than {CLEANUP_S:.0f} s; ending", file=sys.stderr)
    os._exit(code)


def read_result(exit_file: Path) -> WorkerResult:
    """Read the result that `main` wrote; an empty one if the process was ended before that, or the file is damaged."""
    try:
        return load(WorkerResult, exit_file.read_bytes())
    except (OSError, ValueError):
        return WorkerResult()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "rb") as given:
        _spec = load(ChildSpec, given.read())
    main(_spec)

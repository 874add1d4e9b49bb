"""Functions as they are sent to the workers.

cloudpickle sends a function of `__main__` by value and one of a module by its name. The nodes do not have the user's
modules, so the function's own module is sent by value, too, if it is not installed. Modules that it imports are not:
they may hold what cannot be pickled, and Ray's `runtime_env` brings them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.ray.installed import load_ray

_lock = threading.Lock()
_uses: Counter[str] = Counter()  # how many executors send a module by value; the user's own registrations do not count


@contextmanager
def by_value(*functions: Callable | None) -> Iterator[None]:
    """Send the modules of these functions by value where they are the user's own."""
    load_ray()
    cloudpickle = importlib.import_module("ray.cloudpickle")
    modules = {m for f in functions if f is not None and (m := _module_of(f)) is not None}
    with _lock:  # executors in several threads may send functions of one module
        users = {name for name in cloudpickle.list_registry_pickle_by_value() if not _uses[name]}
        modules = {m for m in modules if m.__name__ not in users}
        for module in modules:
            _uses[module.__name__] += 1
            cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _uses[module.__name__] -= 1
                if not _uses[module.__name__]:
                    cloudpickle.unregister_pickle_by_value(module)


def _module_of(function: Callable) -> Any:
    """Return the function's module, if a node cannot import it; else None."""
    module = inspect.getmodule(inspect.unwrap(function))
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ in ("__main__", "__mp_main__"):
        return None
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = Path(sys.modules["spotfleet"].__file__ or "").parent
    return None if any(Path(file).is_relative_to(folder) for folder in (*installed, own)) else module


def check_sendable(function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UsageError if the function or an argument cannot be pickled; the message names the variable."""
    if not callable(function):
        raise UsageError(f"{function!r} is not a function", hint="pass a function: executor.run(train)")
    name = getattr(function, "__qualname__", repr(function))
    with by_value(function):
        if not (why := _refusal(function)):
            for label, value in [*((f"args[{n}]", a) for n, a in enumerate(args)), *kwargs.items()]:
                if why := _refusal(value):
                    raise UsageError(f"{label} of {name} cannot be sent to the workers: {why}",
                                     hint="pass plain data, and create such objects inside the function")
            return
        for variable, value in _variables(function):
            if inner := _refusal(value):
                raise UsageError(
                    f"the function {name} cannot be sent to the workers: its variable {variable!r} "
                    f"(a {type(value).__name__}) cannot be pickled: {inner}",
                    hint=f"create {variable!r} inside the function")
    raise UsageError(f"the function {name} cannot be sent to the workers: {why}",
                     hint="create objects that cannot be pickled inside the function")


def _refusal(value: Any) -> str:
    """Return why cloudpickle refuses the value; "" if it does not."""
    cloudpickle = importlib.import_module("ray.cloudpickle")
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - a __reduce__ of the user's may raise anything; it becomes the message
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ""


def _variables(function: Callable) -> Iterator[tuple[str, Any]]:
    """Yield the variables from outside that the function uses, with their values."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:  # an object with __call__
        yield from vars(function).items()
        return
    yield from found.nonlocals.items()
    yield from found.globals.items()

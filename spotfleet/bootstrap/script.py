"""Files of a host, and the commands that start, check and remove one. Texts only."""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
from functools import cache
from importlib.resources import files as package_files

from spotfleet.bootstrap import HostPlan
from spotfleet.codec import to_text
from spotfleet.errors import UsageError
from spotfleet.model import Role

SETTINGS = "settings.sh"
SCRIPTS = ("bootstrap.sh", "remove.sh", "fetch.py", "inherit.py")
_LAYOUT = 1  # version of an environment's layout: another one is another digest
_OURS = {SETTINGS, *SCRIPTS, "claim", "listing.json", "state", "stages", "found.sh", "wheel", "packages.txt",
         "console.log", "bootstrap.log"}


def files(plan: HostPlan) -> dict[str, str]:
    """Map names to texts of all files for ROOT/REQUEST_ID, mode 0600, before `start`; without wheel and listing.json.

    Raises UsageError for a plan that no machine can follow.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", plan.request_id):
        raise UsageError(f"request_id: {plan.request_id!r} is no name for a folder", hint="letters, digits, - _ .")
    for name in plan.files:
        if name in _OURS or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise UsageError(f"files: {name!r} cannot lie in the host's folder", hint="another plain name")
    for requirement in plan.environment.packages:
        if re.search(r"[\r\n]", requirement):
            raise UsageError(f"environment.packages: {requirement!r} is not one line", hint="one requirement per entry")
    return {**plan.files, **{name: text(name) for name in SCRIPTS}, SETTINGS: settings(plan),
            "packages.txt": "".join(f"{p}\n" for p in plan.environment.packages)}


def text(name: str) -> str:
    """Return the text of a script of this package."""
    return (package_files("spotfleet.bootstrap") / name).read_text("utf-8")


@cache
def short(name: str) -> str:
    """Return a script of this package without comments and docstrings, since the user data of a machine is limited."""
    if name.endswith(".py"):
        return _without_docstrings(text(name))
    first, _, rest = text(name).partition("\n")
    rest = re.sub(r"(?m)^ *#.*\n", "", rest)
    return f"{first}\n" + re.sub(r"(?m)(?<=\S) +# [^\"'`$\n]*$", "", rest)


def _without_docstrings(source: str) -> str:
    """Return the source, line by line, without its docstrings and the comments that have a line of their own."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and len(node.body) > 1 and (
                ast.get_docstring(node)):
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1:last] = [""] * (last - first + 1)
    return re.sub(r"(?m)^ *#.*\n", "", "".join(lines))


def settings(plan: HostPlan) -> str:
    """Return settings.sh: the variables of bootstrap.sh, one assignment per line."""
    wanted = plan.environment
    values: dict[str, str] = {
        "REQUEST_ID": plan.request_id,
        "ROLE": plan.role.value,
        "MODULE": plan.module,
        "ENVIRONMENT": environment_digest(plan),
        "WHEEL_NAME": plan.wheel_name,
        "WHEEL_SHA256": plan.wheel_sha256,
        "WHEEL_URL": plan.wheel_url,
        "EXTRAS": extras(plan),
        "NEEDS": needs(plan),
        "PYTHON": wanted.python,
        "INHERIT": "yes" if wanted.inherit else "",
        "INDEX_URL": wanted.index_url,
        "INSTALLER": wanted.installer,
        "ADDRESS": plan.address,
        "PORT": str(plan.port),
        "METADATA_URL": plan.metadata_url,
        "POWER_OFF": "yes" if plan.power_off else "",
        "GPUS": str(plan.gpus),
    }
    for name, value in values.items():
        if re.search(r"[\x00-\x1f\x7f]", value):
            raise UsageError(f"{name.lower()}: {value!r} holds a control character", hint="remove it")
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def environment_digest(plan: HostPlan) -> str:
    """Return the name of the environment: equal for all plans with equal environments."""
    said = f"{_LAYOUT} {to_text(plan.environment)} {plan.wheel_sha256} {extras(plan)} {needs(plan)}"
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def extras(plan: HostPlan) -> str:
    """Return the extras of our own requirements: workers train; an inherited environment is used unchanged."""
    wanted = [*(["train"] if plan.role is Role.WORKER else []), *plan.extras]
    return f"[{','.join(wanted)}]" if wanted and not plan.environment.inherit else ""


def needs(plan: HostPlan) -> str:
    """Return the modules of the plan, which must be importable besides our own."""
    return " ".join(plan.modules)


def shell_path(path: str) -> str:
    """Quote `path` for a shell on the machine; a leading ~/ is the home directory there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def start(root: str, request_id: str) -> str:
    """Return the command that starts or continues the bootstrap; it returns at once, with status 0 if the bootstrap
    runs or is done."""
    return f"bash {shell_path(root)}/{shlex.quote(request_id)}/bootstrap.sh start"


def removal(root: str, request_id: str, *, keep_environments: bool = False) -> str:
    """Return the command that removes a host, reading `text("remove.sh")` from stdin. Its status is 0 when nothing of
    the host is left, else stderr lists the rest. With an empty `request_id` it removes only unused files."""
    keep = "--keep-environments " if keep_environments else ""
    return f"env -u SPOTFLEET_HOST_MARK sh -s -- {keep}{shell_path(root)} {shlex.quote(request_id)}"

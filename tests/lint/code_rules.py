"""Lint rules about the text of Python files: functions, classes, errors, secrets, pickles, sizes of folders."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.source_tree import PRODUCT, Tree

LONGEST_FUNCTION = 60  # lines
MODULES_PER_FOLDER = 15  # in the product
FILES_PER_FOLDER = 25  # elsewhere
OTHER_FOLDERS = ("tests", "bench", "docs", "examples", "scripts", "ami")
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b")
SECRET = {"secrets", "token", "admin_token", "fleet_secret"}  # fields
FRAGMENT = re.compile(r"#+:? *of\b", re.IGNORECASE)  # a comment without the noun that it is about
RENAMERS = {  # the helper, and scripts that run on a bare machine, without it
    "spotfleet/storage/atomic.py", "spotfleet/bootstrap/fetch.py", "spotfleet/bootstrap/gang_place.py"}
ON_LINUX = tuple(f"spotfleet/{folder}/" for folder in ("agent", "dispatcher", "train", "worker", "bootstrap", "ray"))
LINUX_ONLY = frozenset((
    "pidfd_open", "pidfd_send_signal", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise",
    "copy_file_range", "eventfd", "memfd_create", "setns", "unshare", "splice", "getrandom", "O_TMPFILE", "O_PATH",
    "fdatasync", "pipe2", "waitid", "sigtimedwait", "sigwaitinfo", "epoll", "listxattr", "SO_PEERCRED",
    "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_INFO", "AF_NETLINK", "CLOCK_BOOTTIME", "prlimit", "F_OFD_SETLK",
))
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}  # modules: the data may be a program
READERS = {"torch", "np", "numpy"}  # can unpickle, too

CLOUD = re.compile(r"""["'](?:aws|gcp|azure)["']|\bAwsSpec\b|\bproviders\.(?:aws|gcp|azure)\b""")
CLOUDS_PLACES = ("spotfleet/providers/aws/", "spotfleet/providers/gcp/", "spotfleet/providers/azure/",
                 "spotfleet/interruptions/", "spotfleet/simulate/formats/", "spotfleet/storage/schemes.py")


def the_core_names_no_cloud(tree: Tree) -> list[str]:
    """It branches on a plugin's traits. Places that may name one: its own folder, notice sources, formats of recorded
    markets, the table of storage schemes, the data of the catalog."""
    return [f"{source.name}:{number}: names {found[0]}; ask the plugin: spotfleet/plugins.py"
            for source in tree.product if not source.name.startswith(CLOUDS_PLACES)
            for number, line in enumerate(source.text.splitlines(), 1) if (found := CLOUD.search(line))]


def a_function_is_short(tree: Tree) -> list[str]:
    return [f"{source.name}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
            for source in tree.code for node in source.of_type(ast.FunctionDef, ast.AsyncFunctionDef)
            if node.end_lineno - node.lineno >= LONGEST_FUNCTION]


def no_error_is_hidden(tree: Tree) -> list[str]:
    return [f"{source.name}:{node.lineno}: every error is caught and dropped"
            for source in tree.code for node in source.of_type(ast.ExceptHandler)
            if (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
            and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)]


def nothing_is_left_to_do_later(tree: Tree) -> list[str]:
    return [f"{source.name}:{number}: {found[0]}"
            for source in tree.code if UNFINISHED.search(source.text)
            for number, line in enumerate(source.text.splitlines(), 1) if (found := UNFINISHED.search(line))]


def a_comment_names_what_it_is_about(tree: Tree) -> list[str]:
    """"of the last launch" leaves out the noun: "time of the last launch". A comment's later lines may begin so."""
    return [f"{source.name}:{line}: {text}"
            for source in tree.code if FRAGMENT.search(source.text)
            for line, text in _comments(source.text) if FRAGMENT.match(text)]


def a_class_name_is_unique_in_the_product(tree: Tree) -> list[str]:
    """Names with a leading underscore are private to their module, and nested classes to their owner."""
    return [f"{place}: class {name} is also in {', '.join(p for p in places if p != place)}"
            for name, places in _class_names(tree).items() if len(places) > 1
            for place in places]


def a_printed_value_shows_no_secret(tree: Tree) -> list[str]:
    found = []
    for source in tree.product:
        if any(found.name.startswith("pydantic") for found in source.imports):
            continue  # its fields say so in another way
        for kind in source.of_type(ast.ClassDef):
            fields = {ast.unparse(f.target): ast.unparse(f) for f in kind.body if isinstance(f, ast.AnnAssign)}
            if not any(isinstance(f, ast.FunctionDef) and f.name == "__repr__" for f in kind.body):
                found += [f"{source.name}:{kind.lineno}: {kind.name}.{name} needs repr=False"
                          for name in sorted(SECRET & fields.keys()) if "repr=False" not in fields[name]]
    return found


def unpickling_is_listed_in_the_security_document(tree: Tree) -> list[str]:
    """`docs/security.md`, "Pickles", names each file that may run what it reads."""
    document = tree.root / "docs" / "security.md"
    listed = document.read_text().partition("## Pickles")[2] if document.exists() else ""
    found = []
    for source in tree.product:
        calls = list(_unpickling_calls(source.nodes))
        uses = [*calls, *(i for i in source.imports if i.name.split(".")[0] in UNPICKLERS)]
        if bool(uses) != (f"| `{source.name}` |" in listed):
            found.append(f"{source.name}:1: " + ("unpickles, and docs/security.md does not list it" if uses
                                                 else "is listed in docs/security.md, and unpickles nothing"))
        found += [f"{source.name}:{call.lineno}: torch.load without weights_only=True" for call in calls
                  if (text := ast.unparse(call)).startswith("torch.") and "weights_only=True" not in text]
    return found


def a_file_is_renamed_by_the_one_helper(tree: Tree) -> list[str]:
    """`storage/atomic.py` syncs the folder too. `Path.replace` has one argument, `str.replace` has two."""
    return [f"{source.name}:{node.lineno}: rename through spotfleet/storage/atomic.py"
            for source in tree.product if source.name not in RENAMERS
            for node in source.of_type(ast.Call)
            if isinstance(node.func, ast.Attribute) and (
                (node.func.attr in ("rename", "replace") and len(node.args) == 1 and not _is_atomic(node.func))
                or ast.unparse(node.func) in ("os.rename", "os.replace", "os.renames", "shutil.move"))]


def _is_atomic(call: ast.Attribute) -> bool:
    return ast.unparse(call.value) == "atomic"


def the_command_line_calls_nothing_that_only_linux_has(tree: Tree) -> list[str]:
    """Hosts run Linux; a laptop may run macOS, where nothing was tried. A use inside `if hasattr(...)` may stay."""
    return [f"{source.name}:{node.lineno}: only Linux has {ast.unparse(node)}"
            for source in tree.product if not source.name.startswith(ON_LINUX)
            for node in source.of_type(ast.Attribute)
            if node.attr in LINUX_ONLY and isinstance(node.value, ast.Name)
            and f'hasattr({node.value.id}, "{node.attr}")' not in source.text]


def every_error_class_is_used(tree: Tree) -> list[str]:
    """A class of `errors.py` that nothing raises or catches has neither cause nor reaction."""
    name = f"{PRODUCT}/errors.py"
    errors = [source for source in tree.product if source.name == name]
    used = "\n".join(source.text for source in tree.product if source.name != name)
    return [f"{name}:{node.lineno}: {node.name} is used nowhere"
            for source in errors for node in source.parsed.body
            if isinstance(node, ast.ClassDef) and not re.search(rf"\b{node.name}\b", used)]


def a_folder_is_small(tree: Tree) -> list[str]:
    return [f"{folder}:1: {count} files in one folder, {limit} at most"
            for folder, count, limit in _folders(tree) if count > limit]


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment, without the later lines of one that has several."""
    above = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            if above != line - 1 or token.line[:column].strip():
                yield line, token.string
            above = line


def _class_names(tree: Tree) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for source in tree.product:
        for node in source.parsed.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{source.name}:{node.lineno}")
    return places


def _unpickling_calls(nodes: list[ast.AST]) -> Iterator[ast.Call]:
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="load" | "loads" | "open" | "Unpickler")):
                if module in UNPICKLERS | READERS:
                    yield node


def _folders(tree: Tree) -> Iterator[tuple[str, int, int]]:
    """Each folder, its number of files that count, and the limit."""
    for top in (PRODUCT, *OTHER_FOLDERS):
        for folder, below, names in os.walk(tree.root / top):
            below[:] = [name for name in below if name != "__pycache__" and not name.startswith(".")]
            path = Path(folder).relative_to(tree.root).as_posix()
            counted = [n for n in names if n.endswith(".py") or (top != PRODUCT and not n.endswith(".pyc"))]
            yield path, len(counted), MODULES_PER_FOLDER if top == PRODUCT else FILES_PER_FOLDER

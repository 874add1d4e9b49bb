"""Facts about a training script, read from its source without running it.

The reader follows the script's imports of modules beside it. It states a fact only if it has read everything that could
change it: an unknown package, `exec`, a subprocess or a syntax error makes it unsure.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.errors import UsageError

MOST_FILES = 200
MOST_BYTES = 2_000_000
HOROVOD = "horovod"
ELASTIC_HINT = 'put the training loop into a function under @hvd.elastic.run (README, "Make a script elastic")'
# Packages that neither start the script anew nor use spotfleet by themselves; and modules and calls that may run other
# code than what is read.
_KNOWN = """
torch torchvision torchaudio torchtext numpy scipy sklearn pandas matplotlib seaborn PIL cv2 tqdm yaml requests
transformers datasets tokenizers accelerate evaluate peft lightning pytorch_lightning torchmetrics timm einops keras
tensorboard tensorboardX wandb mlflow h5py safetensors sentencepiece tiktoken nltk packaging psutil rich click typer
omegaconf absl numba pyarrow boto3 fsspec typing_extensions filelock six
"""
KNOWN = frozenset(sys.stdlib_module_names) | frozenset(_KNOWN.split())
UNSURE_MODULES = frozenset(("importlib", "runpy", "subprocess", "multiprocessing", "imp", "code", "pty"))
STARTERS = frozenset(("subprocess", "multiprocessing", "pty"))  # those of them that run no other code in this process
UNSURE_NAMES = frozenset(("exec", "eval", "__import__"))
UNSURE_METHODS = frozenset(("system", "popen", "spawn", "execv", "execve", "execvp", "fork", "import_module"))
# Names and packages of scripts that torchrun, or a launcher like it, starts.
LAUNCHED_NAMES = frozenset((
    "init_process_group", "init_device_mesh", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))
PLACE_NAMES = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE"))
LAUNCHED_PACKAGES = frozenset(("accelerate", "deepspeed", "lightning", "pytorch_lightning", "colossalai", "torchtitan"))
# Calls that write files, and packages that write checkpoints unasked; the folders whose files are collected.
SAVERS = frozenset(("save", "savez", "savefig", "save_pretrained", "save_model", "save_state", "save_checkpoint",
                    "to_csv", "to_parquet"))
SAVING_PACKAGES = frozenset(("lightning", "pytorch_lightning"))
COLLECTED = frozenset(("SPOTFLEET_OUTPUT", "SPOTFLEET_CHECKPOINT_DIR"))
COLLECTIVES = ("DistributedOptimizer", "allreduce", "grouped_", "allgather", "reducescatter", "alltoall")
_MISSING = re.compile(r"(?m)^ModuleNotFoundError: No module named '(horovod[\w.]*)'")
_NO_MODULE = re.compile(r"(?m)^ModuleNotFoundError: No module named '(\w+)[\w.]*'")
_PLACE = re.compile(r'(?m)^  File "([^"]+)", line (\d+), in .*\n    (.+)$')


@dataclass(frozen=True)
class HorovodImport:
    """An import of Horovod."""

    file: str
    line: int
    text: str

    @property
    def advice(self) -> str:
        return f"line {self.line} of {self.file}: {_instead(self.text)}"


@dataclass
class ScriptFacts:
    """What was found in a script and the modules beside it."""

    script: str
    sure: bool = True  # all that the script can run has been read
    hides: bool = False  # it may run code of ours that has not been read
    trains: bool = False  # imports spotfleet.train
    inits: bool = False  # calls its init()
    names: set[str] = field(default_factory=set)  # identifiers and attributes, also inside strings that name them
    horovod: list[HorovodImport] = field(default_factory=list)  # imports that always run
    packages: set[str] = field(default_factory=set)  # top-level packages that it imports
    spawns: bool = False  # calls spawn() of a module, as torch.multiprocessing has it

    @property
    def lacks_init(self) -> bool:
        """Whether hvd.init() is surely not called."""
        return self.sure and not self.horovod and not (self.trains and "init" in self.names) and self._lacks_elastic

    @property
    def lacks_elastic_run(self) -> bool:
        """Whether hvd.init() is called, and `elastic.run` surely is not."""
        return self.sure and self.inits and self._lacks_elastic

    @property
    def together(self) -> bool:
        """Whether its workers need each other: it names a distributed optimizer or a collective that reduces."""
        return any(name.startswith(COLLECTIVES) for name in self.names)

    @property
    def _lacks_elastic(self) -> bool:
        return "elastic" not in self.names


def read(script: Path) -> ScriptFacts:
    """Read a script and the modules beside it. Never raises."""
    facts = ScriptFacts(script.name)
    seen: set[Path] = set()
    left, calls, aliases = [script], set[tuple[str, str]](), set[str]()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            if len(seen) > MOST_FILES or path.stat().st_size > MOST_BYTES:
                facts.sure, facts.hides = False, True
                break
            source = path.read_bytes()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            facts.sure, facts.hides = False, True
            continue
        shown = path.relative_to(script.parent).as_posix() if path.is_relative_to(script.parent) else path.name
        reader = _Reader(facts, script.parent, path, shown, source.decode(errors="replace").splitlines())
        left += reader.read(tree)
        calls, aliases = calls | reader.calls, aliases | reader.aliases
    facts.inits |= any((name, "init") in calls for name in aliases)
    return facts


@dataclass(frozen=True)
class ScriptKind:
    """Kind of job for a script: one of model.JOB_KINDS, "" if it is unknown."""

    kind: str
    why: str = ""
    gang: bool = False  # its processes expect torchrun's variables


def kind_of(facts: ScriptFacts) -> ScriptKind:
    """Return the kind of job that fits a script, and the evidence."""
    ours = facts.trains or bool(facts.horovod)
    if ours and not facts._lacks_elastic:
        return ScriptKind("elastic", "it uses hvd.elastic")
    if ours and facts.together and not facts.hides:
        return ScriptKind("restart", "it trains together through hvd without hvd.elastic.run")
    if not ours and (package := min(facts.packages & LAUNCHED_PACKAGES, default="")):
        return ScriptKind("restart", f"it imports {package}", gang=True)
    if not ours and (name := min(facts.names & LAUNCHED_NAMES, default="")):
        return ScriptKind("restart", f"it uses {name}", gang=True)
    if facts.lacks_init:
        return ScriptKind("command", "it does not train together")
    return ScriptKind("")


def launched(facts: ScriptFacts, launcher: str) -> ScriptKind:
    """Return the kind that `launcher` demands: elastic, torchrun or command; "" leaves it to the script."""
    match launcher:
        case "elastic":
            return ScriptKind("elastic", "--launcher elastic")
        case "torchrun":
            return ScriptKind("restart", "--launcher torchrun", gang=not (facts.trains or facts.horovod))
        case "command":
            return ScriptKind("command", "--launcher command")
    return kind_of(facts)


def remarks(facts: ScriptFacts, workers: int, launcher: str = "") -> list[str]:
    """Return what a user should know before the script runs on up to `workers` workers, each line with its hint.

    With `--launcher command` the user has asked that each worker runs all of the script alone.
    """
    lines = [f"it imports Horovod, in whose place hosts have spotfleet.train; hint: {found.advice}"
             for found in facts.horovod]
    if "ray" in facts.packages:
        lines.append("it imports ray: `train` starts it once for each slot, each outside of the fleet's Ray cluster; "
                     f"hint: `spotfleet ray start`, then `spotfleet ray submit {facts.script}`")
    elif facts.lacks_elastic_run and facts.together:
        lines.append("it calls hvd.init() and has no hvd.elastic.run: at each change of hosts all workers start anew, "
                     f"from a checkpoint of its own; hint: {ELASTIC_HINT}")
    elif facts.lacks_elastic_run and workers > 1:
        lines.append("it calls hvd.init() and has neither hvd.DistributedOptimizer nor hvd.elastic.run: each of up to "
                     f"{workers} workers trains alone; hint: wrap the optimizer, and {ELASTIC_HINT}")
    elif facts.lacks_init and workers > 1 and launcher != "command" and kind_of(facts).kind != "restart":
        lacks = "calls no hvd.init()" if facts.trains else "does not import spotfleet.train"
        lines.append(f"it {lacks}: each of up to {workers} workers runs all of it alone; "
                     f"hint: --np 1, or {ELASTIC_HINT}")
    if workers > 1 and facts.spawns and kind_of(facts).gang and not facts.names & PLACE_NAMES:
        lines.append(f"it starts processes by itself (spawn) and reads no RANK: each of up to {workers} workers starts "
                     "its own, and they do not train together; hint: --np 1, or read RANK, LOCAL_RANK and WORLD_SIZE "
                     "as torchrun sets them, and spawn nothing")
    return [f"{facts.script}: {line}" for line in lines]


def uncollected(facts: ScriptFacts, together: bool) -> str:
    """Return a line for a script that saves files outside of the collected folders; "" for any other.

    `together` means that its processes start anew together, and read what they saved.
    """
    if facts.names & COLLECTED or not (facts.names & SAVERS or facts.packages & SAVING_PACKAGES):
        return ""
    if together:
        return (f"{facts.script}: it saves files, and no --checkpoint-dir names them: each host keeps its own, so a "
                "start anew may resume from different ones or from none, and `spotfleet down` copies none of them; "
                "hint: --checkpoint-dir DIR, or a pattern such as --checkpoint-dir '*.pt'")
    return (f"{facts.script}: it saves files, and not in $SPOTFLEET_OUTPUT: they stay on their host, and are lost with "
            'it and at `spotfleet down`; hint: save them in os.environ.get("SPOTFLEET_OUTPUT", ".")')


class _Reader:
    """Reader of one file."""

    def __init__(self, facts: ScriptFacts, top: Path, path: Path, shown: str, lines: list[str]) -> None:
        self._facts, self._top, self._path, self._shown, self._lines = facts, top, path, shown, lines
        self._found: list[Path] = []
        self.calls: set[tuple[str, str]] = set()  # ("hvd", "init") for hvd.init()
        self.aliases: set[str] = set()  # names of spotfleet.train

    def read(self, tree: ast.Module) -> list[Path]:
        """Return the files beside the script that this one imports."""
        certain = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    for alias in node.names:
                        self._import(alias.name, node, id(node) in certain)
                        if alias.name == "spotfleet.train":
                            self.aliases.add(alias.asname or "train")
                case ast.ImportFrom():
                    self._import_from(node, id(node) in certain)
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    self._facts.names.add(name)
                case ast.Constant(value=str() as text) if text.replace(".", "").isidentifier():
                    self._facts.names.update(text.split("."))  # getattr(hvd, "elastic")
                case ast.Call():
                    self._call(node.func)
        return self._found

    def _call(self, function: ast.expr) -> None:
        match function:
            case ast.Name(id=name) if name in UNSURE_NAMES:
                self._facts.sure, self._facts.hides = False, True
            case ast.Attribute(attr=name) if name in UNSURE_METHODS:
                self._facts.sure = False
                self._facts.spawns |= name == "spawn"
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                self.calls.add((owner, name))

    def _import_from(self, node: ast.ImportFrom, certain: bool) -> None:
        if node.level:
            package = self._path.parent
            for _ in range(node.level - 1):
                package = package.parent
            self._beside(package, node.module.split(".") if node.module else [], node)
            return
        module = node.module or ""
        names = {alias.name: alias.asname or alias.name for alias in node.names}
        self._facts.names.update(names)
        if module == "spotfleet":
            self.aliases.update(names[name] for name in names if name == "train")
        elif module == "spotfleet.train":
            self._facts.inits |= "init" in names
            self._facts.sure &= "*" not in names
        self._import(module, node, certain, [alias.name for alias in node.names])

    def _import(self, module: str, node: ast.stmt, certain: bool, names: list[str] | None = None) -> None:
        parts = module.split(".")
        self._facts.names.update(parts[1:])
        self._facts.packages.add(parts[0])
        if parts[0] == "spotfleet":
            self._facts.trains |= "train" in (parts[1:2] or names or [])
        elif parts[0] == HOROVOD:
            if certain:
                text = self._lines[node.lineno - 1].strip()
                self._facts.horovod.append(HorovodImport(self._shown, node.lineno, text))
            else:
                self._facts.sure = False  # it may be guarded
        elif self._find(self._top, parts):
            self._beside(self._top, parts, node if names is not None else None)
        elif parts[0] not in KNOWN or parts[0] in UNSURE_MODULES or parts[:2] == ["torch", "multiprocessing"]:
            self._facts.sure = False
            self._facts.hides |= parts[0] not in STARTERS | {"torch"}

    def _beside(self, folder: Path, parts: list[str], node: ast.stmt | None) -> None:
        """Note a module's file, those of its packages, and those of submodules that a `from` names."""
        for end in range(1, len(parts) + 1):
            if (found := self._find(folder, parts[:end])) is None:
                self._facts.sure, self._facts.hides = False, True
                return
            self._found.append(found)
        for alias in node.names if isinstance(node, ast.ImportFrom) else []:
            if (found := self._find(folder, [*parts, alias.name])) is not None:
                self._found.append(found)

    @staticmethod
    def _find(folder: Path, parts: list[str]) -> Path | None:
        base = folder.joinpath(*parts)
        files = (base.with_name(f"{base.name}.py"), base / "__init__.py")
        return next((f for f in files if f.is_file()), None)


def refuse_fleet_file(script: str) -> None:
    """Raise UsageError for a YAML file in the place of a script."""
    if script.lower().endswith((".yaml", ".yml")):
        raise UsageError(f"{script} is a YAML file, not a Python script",
                         hint=f"`spotfleet up {script}` makes the fleet of a fleet file; then `spotfleet train "
                              "SCRIPT.py` runs a script, and `spotfleet train` alone the file's `run`")


def launcher_hint(words: str) -> str:
    """Return what to type for a launcher, or for an option of torchrun, in the place of a script; else ""."""
    if re.fullmatch(r"torchrun|accelerate|deepspeed|mpirun|python3?", words):
        return ("`spotfleet train SCRIPT.py` starts the script once for each slot; `spotfleet run --nodes N -- "
                f"{words} ...` runs {words} itself")
    if re.match(r"--?(nproc|nnodes|rdzv|standalone|master|num_processes)", words):
        return "torchrun's options are not needed: `--np MIN:MAX` is the number of workers, all hosts take part"
    return ""


def _instead(text: str) -> str:
    """Return the change of a line that imports Horovod."""
    changed = re.sub(r"\bfrom horovod import torch\b", "from spotfleet import train", text)
    changed = re.sub(r"\bhorovod\.torch\b", "spotfleet.train", changed)
    if HOROVOD not in changed:
        return f"write `{changed}` instead of `{text}`"
    if re.fullmatch(r"import horovod(\s*#.*)?", text):
        return "remove `import horovod`: the script runs under spotfleet.train"
    return f"`{text}` has no counterpart: spotfleet.train stands for horovod.torch"


def horovod_advice(error: str) -> str:
    """Return the line to change for a traceback that ends because there is no Horovod; else ""."""
    if not _MISSING.search(error):
        return ""
    for path, line, text in reversed(_PLACE.findall(error)):
        if re.search(r"\bhorovod\b", text):
            return HorovodImport(path.rpartition("/")[2], int(line), text.strip()).advice
    return "write `import spotfleet.train as hvd` where the script imports horovod.torch"


def module_advice(output: str) -> str:
    """Return what to do about output whose last such line names a module that the hosts lack; "" for any other."""
    found = _NO_MODULE.findall(output)
    if not found or found[-1] == HOROVOD:
        return ""
    return (f"the hosts have no module {found[-1]}: to install a package, write `setup: pip install PACKAGE` in "
            "the fleet file, then `spotfleet up FILE`; a file of yours must lie in the working directory")

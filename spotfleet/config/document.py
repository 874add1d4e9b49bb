"""YAML document with the line of each of its keys and values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from spotfleet.errors import UsageError

HINT = "nothing was changed; correct the file, and look at its plan with `spotfleet up FILE --dryrun`"

EXPECTED = "; expected one of "  # before a list of the keys that may stand there

Place = tuple[str | int, ...]  # keys and list positions from the top


@dataclass(frozen=True)
class Problem:
    """A problem of the file, with its line."""

    line: int
    key: str  # dotted; empty: the file as a whole
    text: str  # after EXPECTED, a list of keys

    def __str__(self) -> str:
        return f"{self.line}: {self.key}: {self.text}" if self.key else f"{self.line}: {self.text}"


@dataclass
class Document:
    """A parsed YAML file that collects its problems, and what else there is to tell about it."""

    file: str
    data: dict[str, Any]
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    before_up: list[Problem] = field(default_factory=list)  # a fleet can be planned with these, and not made
    notes: list[str] = field(default_factory=list)  # lines for the user about keys that change nothing

    def add(self, place: Place, text: str) -> None:
        """Note a problem at `place`, or at the nearest line above it that exists."""
        self._add(self.problems, place, text)

    def later(self, place: Place, text: str) -> None:
        """Note what must be done before `up`, and not before a plan."""
        self._add(self.before_up, place, text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _add(self, to: list[Problem], place: Place, text: str) -> None:
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
        problem = Problem(self.lines.get(known, 1), dotted, text)
        if problem not in to:
            to.append(problem)

    def raise_problems(self) -> None:
        if not self.problems:
            return
        lines = [f"{self.file}:{p}" for p in _lists_once(sorted(self.problems, key=lambda p: p.line))]
        if len(lines) == 1:
            raise UsageError(lines[0], hint=HINT)
        raise UsageError("\n  ".join([f"{self.file} has {len(lines)} problems", *lines]), hint=HINT)


def _lists_once(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems; a list of keys is left out if an earlier problem has the same one."""
    given: set[str] = set()
    for problem in problems:
        text, expected, keys = problem.text.partition(EXPECTED)
        yield replace(problem, text=text) if keys in given else problem
        given |= {keys} if expected else set()


def read(text: str, path: Path) -> Document:
    """Parse `text`; UsageError unless it is a YAML mapping. Duplicate keys are noted as problems."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _keep_words(node)
        data = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.problem == "but found another document":
            raise UsageError(f"{path}:{mark.line + 1 if mark else 1}: holds several documents, as a SkyPilot pipeline "
                             "does; a fleet file is one", hint="write each task into a file of its own") from None
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem or error.context}",
                         hint="check the indentation, and quote text that holds ': ' or starts with a sign") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not YAML: {str(error).splitlines()[0]}", hint=HINT) from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}:1: expected `key: value` lines, got {_kind(data)}",
                         hint="a small example: `spotfleet up --help`")
    document = Document(str(path), data)
    for place, line, twice in _walk(node, (), ()):
        if twice:
            document.add(place, f"is here a second time, on line {line}")
        document.lines.setdefault(place, line)
    return document


def _keep_words(node: yaml.Node | None) -> None:
    """Make keys such as `on` and `off` the words that they are: YAML 1.1 reads them as true and false."""
    left, seen = [node], set[int]()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, yaml.SequenceNode):
            left += one.value
        elif isinstance(one, yaml.MappingNode):
            for key, value in one.value:
                if key.tag == "tag:yaml.org,2002:bool":
                    key.tag = "tag:yaml.org,2002:str"
                left += [key, value]


def _kind(value: Any) -> str:
    return "an empty file" if value is None else "a list" if isinstance(value, list) else "a single value"


def _walk(node: yaml.Node, place: Place, above: tuple[yaml.Node, ...]) -> Iterator[tuple[Place, int, bool]]:
    if any(node is n for n in above):
        raise UsageError(f"line {node.start_mark.line + 1}: this anchor holds itself", hint="write the value out")
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*place, index), item.start_mark.line + 1, False
            yield from _walk(item, (*place, index), above)
    elif isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            word = key.value if isinstance(key.value, str) else str(key.value)
            yield (*place, word), key.start_mark.line + 1, word in seen
            seen.add(word)
            yield from _walk(value, (*place, word), above)

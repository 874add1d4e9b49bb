"""Google's discovery documents, held against requests and answers: routes, parameters, bodies, values of enums.

The documents are those that google-api-python-client ships. They name each method's path, its parameters with their
patterns, and the schema of its body and its answer; `annotations.required` names the members that a method needs.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

SIMPLE, RESERVED = re.compile(r"\\\{(\w+)\\\}"), re.compile(r"\\\{\\\+(\w+)\\\}")
OPEN_ENUMS = {"Quota.metric"}  # quotas of new GPUs exist before the document names them
INTEGERS = {"int32": (-(2**31), 2**31 - 1), "uint32": (0, 2**32 - 1)}
LONG = re.compile(r"-?\d+")
BASE64 = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")


@dataclass(frozen=True)
class Method:
    """A method of a service, as "compute.instances.insert"."""

    document: Document
    id: str
    facts: Mapping[str, Any]

    @cached_property
    def path(self) -> re.Pattern[str]:
        text = re.escape(self.document.facts.get("servicePath", "") + self.facts["path"])
        return re.compile("/" + SIMPLE.sub(r"(?P<\1>[^/]+?)", RESERVED.sub(r"(?P<\1>.+?)", text)))

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.facts.get("parameters", {})


class Document:
    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.methods = {m["id"]: Method(self, m["id"], m) for m in _methods(facts)}

    # ---- requests

    def path_problems(self, method: Method, named: Mapping[str, str]) -> list[str]:
        """Return the parameters of a path that do not match their patterns."""
        return [f"Invalid value for field '{name}': '{value}'. Must be a match of regex '{pattern}'"
                for name, value in named.items()
                if (pattern := method.parameters.get(name, {}).get("pattern")) and not re.fullmatch(pattern, value)]

    def query_problems(self, method: Method, query: Mapping[str, list[str]]) -> Iterator[str]:
        known = {**self.facts.get("parameters", {}), **method.parameters}
        for name, values in query.items():
            facts = known.get(name)
            if facts is None or facts.get("location") == "path":
                yield f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter.'
                continue
            if len(values) > 1 and not facts.get("repeated"):
                yield f"Invalid value for field '{name}': it is given {len(values)} times"
            for value in values if name != "$alt" else ():
                yield from self._parameter_problems(name, facts, value)
        yield from (f"Required field '{name}' not specified" for name, facts in method.parameters.items()
                    if facts.get("required") and facts.get("location") == "query" and not query.get(name))

    def _parameter_problems(self, name: str, facts: Mapping[str, Any], value: str) -> Iterator[str]:
        match facts.get("type"):
            case "integer":
                if not LONG.fullmatch(value) or not (int(facts.get("minimum", -(2**31))) <= int(value)
                                                     <= int(facts.get("maximum", 2**32 - 1))):
                    yield f"Invalid value at '{name}' (TYPE_UINT32), \"{value}\""
            case "boolean":
                if value not in ("true", "false", "True", "False"):
                    yield f"Invalid value at '{name}' (TYPE_BOOL), \"{value}\""
            case _:
                yield from self._text(name, facts, value, name)

    def body_problems(self, method: Method, body: Any) -> Iterator[str]:
        reference = method.facts.get("request", {}).get("$ref")
        if reference is None:
            if body not in (None, {}):
                yield "Invalid JSON payload received: this method takes no body"
            return
        if body is None:
            yield f"Required field '{method.facts['request'].get('parameterName', 'resource')}' not specified"
            return
        yield from self.problems({"$ref": reference}, body, "resource", method.id)

    # ---- answers

    def answer_problems(self, method: Method, body: Any) -> list[str]:
        reference = method.facts.get("response", {}).get("$ref")
        if reference is None:
            return [] if body in (None, {}) else [f"answer to {method.id}: it has none"]
        return [f"answer to {method.id}: {p}" for p in self.problems({"$ref": reference}, body, "answer", "")]

    # ---- schemas

    def problems(self, schema: Mapping[str, Any], value: Any, path: str, method: str, name: str = "") -> Iterator[str]:
        """Yield the violations of `schema` in `value`; without a method nothing is required."""
        if reference := schema.get("$ref"):
            schema, name = self.facts["schemas"][reference], reference
        match schema.get("type"):
            case "object":
                yield from self._object(schema, value, path, method, name)
            case "array":
                if not isinstance(value, list):
                    yield f"Invalid value at '{path}': {value!r} is no list"
                    return
                for at, part in enumerate(value):
                    yield from self.problems(schema["items"], part, f"{path}[{at}]", method, name)
            case "string":
                if not isinstance(value, str):
                    yield f"Invalid value at '{path}' (TYPE_STRING), {value!r}"
                    return
                yield from self._text(path, schema, value, name)
            case "integer":
                least, most = INTEGERS[schema.get("format", "int32")]
                if type(value) is not int or not least <= value <= most:
                    yield f"Invalid value at '{path}' (TYPE_INT32), {value!r}"
            case "number":
                if type(value) not in (int, float):
                    yield f"Invalid value at '{path}' (TYPE_DOUBLE), {value!r}"
            case "boolean":
                if type(value) is not bool:
                    yield f"Invalid value at '{path}' (TYPE_BOOL), {value!r}"

    def _object(self, schema: Mapping[str, Any], value: Any, path: str, method: str, name: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"Invalid value at '{path}': {value!r} is no object"
            return
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, part in value.items():
            if key in known:
                yield from self.problems(known[key], part, f"{path}.{key}", method, f"{name}.{key}")
            elif others:
                yield from self.problems(others, part, f"{path}.{key}", method, name)
            else:
                yield f"Invalid JSON payload received. Unknown name \"{key}\" at '{path}': Cannot find field."
        for key, facts in known.items():
            if method in facts.get("annotations", {}).get("required", ()) and value.get(key) is None:
                yield f"Invalid value for field '{path}.{key}': ''. The field is required."

    def _text(self, path: str, schema: Mapping[str, Any], value: str, name: str) -> Iterator[str]:
        if schema.get("format") in ("int64", "uint64"):
            if not LONG.fullmatch(value):
                yield f"Invalid value at '{path}' (TYPE_INT64), \"{value}\""
        elif schema.get("format") == "byte" and not BASE64.fullmatch(value):
            yield f"Invalid value at '{path}' (TYPE_BYTES), \"{value}\""
        if "enum" in schema and value not in schema["enum"] and name not in OPEN_ENUMS:
            yield f"Invalid value for field '{path}': '{value}'. Must be one of {', '.join(schema['enum'][:12])}"
        if "pattern" in schema and not _compiled(schema["pattern"]).fullmatch(value):
            yield f"Invalid value for field '{path}': '{value}'. Must be a match of regex '{schema['pattern']}'"


class Routes:
    """The methods of several services, found by the path of a request."""

    def __init__(self, *names: str) -> None:
        self.documents = {name: document(name) for name in names}
        self._by_shape: dict[tuple[str, int], list[Method]] = {}
        self._open: dict[str, list[Method]] = {}  # paths with a parameter of several segments
        for found in self.documents.values():
            for method in found.methods.values():
                verb, path = method.facts["httpMethod"], found.facts.get("servicePath", "") + method.facts["path"]
                if "{+" in path:
                    self._open.setdefault(verb, []).append(method)
                else:
                    self._by_shape.setdefault((verb, path.count("/") + 1), []).append(method)

    def find(self, verb: str, path: str) -> tuple[Method, dict[str, str]] | None:
        """Return the method and the values in its path. One whose patterns do not match is second choice."""
        second = None
        for method in (*self._by_shape.get((verb, path.count("/")), ()), *self._open.get(verb, ())):
            if found := method.path.fullmatch(path):
                named = found.groupdict()
                if not method.document.path_problems(method, named):
                    return method, named
                second = second or (method, named)
        return second


@cache
def document(name: str) -> Document:
    """The document of a service, as "compute.v1"."""
    found = importlib.util.find_spec("googleapiclient")
    if found is None or found.origin is None:
        raise RuntimeError("the fake of Google Cloud needs google-api-python-client: pip install 'spotfleet[dev]'")
    path = Path(found.origin).parent / "discovery_cache" / "documents" / f"{name}.json"
    return Document(json.loads(path.read_text()))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _methods(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in facts.get("resources", {}).values():
        yield from resource.get("methods", {}).values()
        yield from _methods(resource)

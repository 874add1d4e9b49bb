"""botocore's models of the services, held against requests and answers: a second opinion beside this fake's own.

botocore checks a request for types, required members and minimal values before it sends it. Its models also have
patterns, enums and maximal values, which the services check, and the documentation names the filters of each listing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any
from xml.etree import ElementTree

MODELS = {"servicequotas": "service-quotas"}
LETTERS = {r"\uD800\uDC00-\uDBFF\uDFFF": r"\U00010000-\U0010ffff", r"\p{L}": r"\w",
           r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{M}": r"\w", r"\p{P}": r"!-/:-@\[-`{-~"}
FILTERS = re.compile(r"<li>\s*<p>\s*<code>([^<]+)</code>")  # names in the documentation of a listing
FILTER_VALUES = 200  # EC2's maximum per request
# Values that services use though an enum lacks them: new instance types, a feature of them in EC2's recorded
# descriptions, the state of an attached internet gateway (API reference, "InternetGatewayAttachment"), and those of
# a VPC endpoint, for which Terraform's provider waits.
OPEN_ENUMS = {"InstanceType"}
UNDOCUMENTED = {("DescribeVpcs", "isDefault")}  # Terraform's provider finds the default VPC of every account by it
UNLISTED = {("SupportedAdditionalProcessorFeature", "metal-compatibility"), ("AttachmentStatus", "available"),
            ("State", "available"), ("State", "deleted")}


@cache
def _service(service: str) -> Any:
    from botocore.model import ServiceModel

    return ServiceModel(_loader().load_service_model(MODELS.get(service, service), "service-2"), service)


@cache
def _loader() -> Any:
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


@cache
def _operation(service: str, name: str) -> Any | None:
    """Return the model of an operation; None for one that the service does not have."""
    model = _service(service)
    return model.operation_model(name) if name in model.operation_names else None


# ---- requests


def refused(service: str, name: str, params: dict[str, Any]) -> list[str]:
    """Return what the model of the service refuses in a request."""
    operation = _operation(service, name)
    if operation is None:
        return [f"{service} has no operation {name}"]
    shape = operation.input_shape
    problems = list(_refused(shape, params, name)) if shape is not None else [f"{name}.{k}: unknown" for k in params]
    return problems + (_filters(shape, name, params) if service == "ec2" and shape is not None else [])


def _refused(shape: Any, value: Any, path: str) -> Iterator[str]:
    match shape.type_name:
        case "structure":
            if not isinstance(value, dict):
                yield f"{path}: {value!r} is no structure"
                return
            yield from (f"{path}.{name}: missing" for name in shape.required_members if value.get(name) is None)
            for name, part in value.items():
                if name not in shape.members:
                    yield f"{path}.{name}: unknown"
                elif part is not None:
                    yield from _refused(shape.members[name], part, f"{path}.{name}")
        case "list":
            if not isinstance(value, (list, tuple)):
                yield f"{path}: {value!r} is no list"
                return
            yield from _outside(shape, len(value), path, "items")
            for at, part in enumerate(value):
                yield from _refused(shape.member, part, f"{path}[{at}]")
        case "map":
            yield from _outside(shape, len(value), path, "entries")
            for key, part in value.items():
                yield from _refused(shape.key, key, f"{path} key")
                yield from _refused(shape.value, part, f"{path}.{key}")
        case "string":
            yield from _text(shape, value, path)
        case "integer" | "long" | "float" | "double":
            yield from _outside(shape, float(value), path, "")
        case "boolean":
            if str(value).lower() not in ("true", "false"):
                yield f"{path}: {value!r} is neither true nor false"


def _text(shape: Any, value: Any, path: str) -> Iterator[str]:
    text = str(value)
    yield from _outside(shape, len(text), path, "characters")
    yield from _enum(shape, text, path)
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(text):
        yield f"{path}: {text[:80]!r} does not match {pattern}"


def _enum(shape: Any, text: str, path: str) -> Iterator[str]:
    if shape.enum and text not in shape.enum and shape.name not in OPEN_ENUMS and (shape.name, text) not in UNLISTED:
        yield f"{path}: {text!r} is none of {', '.join(shape.enum[:12])}"


def _outside(shape: Any, number: float, path: str, unit: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if (least is not None and number < least) or (most is not None and number > most):
        yield f"{path}: {number:g} {unit} where {least} to {most} are allowed".replace("  ", " ")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of Java's or JavaScript's; classes of Unicode become Python's nearest. EC2's of a placement
    group's ARN has a second beginning in its middle, so nothing would match."""
    pattern = pattern.replace("/^", "/")
    plain = r"\p{" not in pattern
    for java, python in LETTERS.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern.replace(r"\w-", r"\w\-"), re.ASCII if plain else 0)


def _filters(shape: Any, name: str, params: dict[str, Any]) -> list[str]:
    """Return the filters that the documentation of the listing does not name, or that have too many values."""
    given = params.get("Filters") or []
    if not given or "Filters" not in shape.members:
        return []
    problems = [f"{name}: filter {f.get('Name')!r} is not documented" for f in given
                if not _documented(name, str(f.get("Name", "")))]
    if sum(len(f.get("Values", [])) for f in given) > FILTER_VALUES:
        problems.append(f"{name}: more than {FILTER_VALUES} values of filters")
    return problems


def _documented(name: str, wanted: str) -> bool:
    known = _filter_names(name)
    return not known or wanted in known or (name, wanted) in UNDOCUMENTED or (
        wanted.startswith("tag:") and any(k.startswith("tag:") or k == "tag" for k in known))


@cache
def _filter_names(name: str) -> frozenset[str]:
    return frozenset(FILTERS.findall(_operation("ec2", name).input_shape.members["Filters"].documentation))


# ---- answers


def unknown_members(service: str, name: str, result: dict[str, Any]) -> list[str]:
    """Return what the model of an operation refuses in an answer before it becomes text."""
    operation = _operation(service, name)
    if operation is None or operation.output_shape is None:
        return [f"answer to {name}: {key} is unknown" for key in result]
    return list(_refused(operation.output_shape, result, f"answer to {name}"))


def unknown(service: str, name: str, body: bytes) -> list[str]:
    """Return the elements of an answer in XML that the model of the operation does not have."""
    return list(_unknown(service, name, body))


@lru_cache(maxsize=300)  # clients poll
def _unknown(service: str, name: str, body: bytes) -> Sequence[str]:
    operation = _operation(service, name)
    if operation is None:
        return [f"{service} has no operation {name}"]
    root = ElementTree.fromstring(body)
    shape = operation.output_shape
    if service != "ec2":  # query: <NameResponse><NameResult>...</NameResult><ResponseMetadata/></NameResponse>
        tops = [_name(e) for e in root]
        problems = [f"{name}: <{t}>" for t in tops if t not in (f"{name}Result", "ResponseMetadata")]
        root = next((e for e in root if _name(e) == f"{name}Result"), ElementTree.Element("none"))
        return problems + list(_strange(shape, root, name))
    return list(_strange(shape, root, name, {"requestId"}))


def _strange(shape: Any, element: Any, path: str, beside: frozenset[str] | set[str] = frozenset()) -> Iterator[str]:
    match shape.type_name if shape is not None else "structure":
        case "structure":
            known = _serialized(shape) if shape is not None else {}
            for part in element:
                tag = _name(part)
                if tag in known:
                    yield from _strange(known[tag], part, f"{path}.{tag}")
                elif tag not in beside:
                    yield f"{path}: <{tag}>"
        case "list":
            wanted = shape.member.serialization.get("name", "member")
            for part in element:
                if _name(part) == wanted:
                    yield from _strange(shape.member, part, f"{path}[]")
                else:
                    yield f"{path}: <{_name(part)}> in a list of <{wanted}>"
        case "string":
            yield from _enum(shape, element.text or "", path)


def _serialized(shape: Any) -> dict[str, Any]:
    return {member.serialization.get("name", name): member for name, member in shape.members.items()}


def _name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]

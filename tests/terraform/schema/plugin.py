"""Server of Terraform's provider plugin protocol that knows schemas, and nothing else.

Terraform finds it by TF_REATTACH_PROVIDERS: no binary, no registry, no lock file. It answers GetProviderSchema; an
empty answer to the other calls means "no objection". Plans and applies are those of `mock_provider`.
Messages are encoded here, since the protocol comes without Python stubs and needs these few.
Source: hashicorp/terraform, docs/plugin-protocol/tfplugin6.9.proto and object-wire-format.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

HERE = Path(__file__).parent
PROVIDERS = ("aws", "azurerm", "google")
SERVICE = "/tfplugin6.Provider/"
NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the recorded providers on sockets in `folder`; yield the value of TF_REATTACH_PROVIDERS."""
    servers, found = [], {}
    try:
        for provider in PROVIDERS:
            server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.max_send_message_length", -1)])
            servers.append(server)
            schemas = json.loads((HERE / f"{provider}.json").read_text())
            server.add_generic_rpc_handlers([SchemaHandler(provider_schema(schemas))])
            address = str(folder / provider)
            server.add_insecure_port(f"unix://{address}")
            server.start()
            found[f"registry.terraform.io/hashicorp/{provider}"] = {
                "Protocol": "grpc", "ProtocolVersion": 6, "Pid": os.getpid(), "Test": True,
                "Addr": {"Network": "unix", "String": address}}
        yield json.dumps(found)
    finally:
        for server in servers:
            server.stop(None).wait()


class SchemaHandler(grpc.GenericRpcHandler):
    """Every call of the service `Provider`."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not call.method.startswith(SERVICE):
            return None
        answer = self._answer if call.method == f"{SERVICE}GetProviderSchema" else b""
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)


# ---- messages


def provider_schema(schemas: Mapping[str, Any]) -> bytes:
    """Encode GetProviderSchema.Response."""
    return b"".join((
        _field(1, _schema(schemas["provider"])),
        *(_field(2, _entry(name, block)) for name, block in schemas["resource_schemas"].items()),
        *(_field(3, _entry(name, block)) for name, block in schemas["data_source_schemas"].items()),
        _field(6, _field(2, True))))  # server_capabilities.get_provider_schema_optional


def _entry(name: str, block: Mapping[str, Any]) -> bytes:
    return _field(1, name) + _field(2, _schema(block))


def _schema(block: Mapping[str, Any]) -> bytes:
    return _field(2, _block(block))


def _block(block: Mapping[str, Any]) -> bytes:
    attributes = (
        _field(1, name) + _field(2, json.dumps(a["type"])) + _field(4, a.get("required", False))
        + _field(5, a.get("optional", False)) + _field(6, a.get("computed", False))
        for name, a in block["attributes"].items())
    nested = (
        _field(1, name) + _field(2, _block(t["block"])) + _field(3, NESTING[t["nesting_mode"]])
        + _field(4, t.get("min_items", 0)) + _field(5, t.get("max_items", 0))
        for name, t in block["block_types"].items())
    return b"".join((*(_field(2, a) for a in attributes), *(_field(3, t) for t in nested)))


def _field(number: int, value: bytes | str | int) -> bytes:
    """Encode one field of a message. A zero is left out, as protobuf's version 3 does."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value) if value else b""
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])

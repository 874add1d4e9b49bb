"""Instances of the fake of Google Cloud that really run: as those of `aws_machines`, with Google's image and metadata.

    with GcpCloud() as cloud, GcpMachines(cloud) as machines:
        machines.laptop.run("spotfleet", "up", ..., env={"SPOTFLEET_GCP_ENDPOINT": machines.endpoint, ...})
        machine = machines[view.id]         # by the number of an instance, which a start keeps

Debian's real cloud-init finds the user data by its own source for Google Cloud; an item `startup-script` runs at each
boot after it, as Google's guest agent runs it. google-auth on a machine gets the tokens of its service account.
"""

from __future__ import annotations

import contextlib
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.fakes.aws_machines import METADATA, AwsMachines, Instance, doors, why_not
from tests.support.fakes.gcp import GcpCloud, InstanceView
from tests.support.fakes.gcp_machines import image

__all__ = ["GcpMachines", "why_not"]

SSH = 22


class GcpMachine(Instance):
    def _metadata_server(self) -> doors.Metadata:
        return doors.Metadata((METADATA, 80), _handler(self._cloud, self.id))  # type: ignore[arg-type]


class GcpMachines(AwsMachines):
    """The runner of a `GcpCloud`, and a laptop."""

    instance = GcpMachine
    _cloud: GcpCloud  # type: ignore[assignment]

    def __init__(self, cloud: GcpCloud, bare: tuple[str, ...] = (), beside: AwsMachines | None = None) -> None:
        """`bare`: images, by name, whose interpreter has no SDK of a cloud, and no installer."""
        super().__init__(cloud, bare, beside)  # type: ignore[arg-type]

    def _spec(self, view: InstanceView, bare: bool) -> dict[str, Any]:  # type: ignore[override]
        return image.spec(view, bare)

    def _lets_in(self, view: InstanceView, address: str) -> bool:  # type: ignore[override]
        return bool(view.public_ip) and self._cloud.admits(view.id, address, SSH)


def _handler(cloud: GcpCloud, instance: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = dict(self.headers.items())
            status, headers, answer = cloud.metadata(instance, self.path, self.command, known, body)
            if not status:  # nobody answers
                self.close_connection = True
                return
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            with contextlib.suppress(ConnectionError):  # who asked may have gone
                self.end_headers()
                self.wfile.write(answer)

        do_PUT = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler

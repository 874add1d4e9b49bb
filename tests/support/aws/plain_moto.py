"""moto's own server, as it is published: another implementation of AWS for the provider, in a process of its own.

    python -m tests.support.aws.plain_moto      prints its port; ends with its standard input

Three things are answered here, since moto lacks them or differs from AWS. All else is moto's, and is right by its own
authors' reading of AWS, not by ours.

    GetEbsDefaultKmsKeyId       not in moto; the answer of an account that has changed nothing
    DescribePlacementGroups     not in moto; no groups
    DeleteLaunchTemplate        of a name that does not exist moto refuses as MissingParameter; EC2's code is
                                InvalidLaunchTemplateName.NotFoundException (its "Error codes" page)

moto's default VPC has no internet gateway; an account's has one ("Default VPCs" in the VPC guide), so tests make it.
moto lists no spot request for an instance of CreateFleet or of a persistent request. A machine of CreateFleet gets the
default security group whatever the template's interface names, and the groups of an interface are not among those of
its instance. A launch takes neither profile nor disk from its template, and makes a second disk. A fleet whose
instances have ended cannot be deleted. The fake does as EC2 in each.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

XMLNS = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
LACKING = {
    "GetEbsDefaultKmsKeyId": "<kmsKeyId>alias/aws/ebs</kmsKeyId>",
    "DescribePlacementGroups": "<placementGroupSet/>",
}
NO_TEMPLATE = ("<Response><Errors><Error><Code>InvalidLaunchTemplateName.NotFoundException</Code><Message>"
               "The launch template does not exist.</Message></Error></Errors><RequestID>r</RequestID></Response>")
Start = Callable[..., Any]


@contextmanager
def plain_moto() -> Iterator[str]:
    """Run the server, and return its URL."""
    command = [sys.executable, "-m", "tests.support.aws.plain_moto"]
    env = os.environ | {"MOTO_IAM_LOAD_MANAGED_POLICIES": "true", "MOTO_EC2_LOAD_DEFAULT_AMIS": "true"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=env) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


class Completed:
    """A WSGI application: moto's, with the answers above."""

    def __init__(self, moto: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> None:
        self.moto = moto

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        action = _action(body)
        if action in LACKING:
            return _answer(start, "200 OK", f"<{action}Response {XMLNS}><requestId>r</requestId>{LACKING[action]}"
                                            f"</{action}Response>")
        if action != "DeleteLaunchTemplate":
            return self.moto(environ, start)
        held: list[Any] = []
        answer = b"".join(self.moto(environ, lambda *given: held.extend(given)))
        if re.search(rb"<Code>MissingParameter<", answer):
            return _answer(start, "400 Bad Request", NO_TEMPLATE)
        start(*held[:2])
        return [answer]


def _action(body: bytes) -> str:
    return parse_qs(body.decode("utf-8", "replace")).get("Action", [""])[0] if body.startswith(b"Action=") else ""


def _answer(start: Start, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(text.encode())))])
    return [text.encode()]


def _serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, Completed(DomainDispatcherApplication(create_backend_app)), threaded=True)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the test's process has ended
    os._exit(0)


if __name__ == "__main__":
    _serve()

"""What machines in namespaces find on their network: the metadata server and the API of the fake cloud.

Their sockets are made by a thread that is in the namespace (`Namespaces.call`), and stay there; whoever serves is not.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from tests.support.fakes.aws import AwsCloud

_CHUNK = 1 << 16


class Metadata(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server who we are

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def metadata(address: tuple[str, int], cloud: AwsCloud, instance_id: str) -> Metadata:
    """Of one instance: hands over what is asked, and says what the fake answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "EC2ws", ""

        def do_GET(self) -> None:
            status, body = cloud.metadata(instance_id, self.path, self.command, dict(self.headers.items()))
            if not status:  # nobody answers
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_PUT = do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Metadata(address, Handler)


class Relay:
    """Bytes both ways between whoever comes to `listener` and a port of this machine's own network."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self._listener, self._to = listener, port
        self.port: int = listener.getsockname()[1]
        self._accepts = threading.Thread(target=self._accept, daemon=True)
        self._accepts.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near = self._listener.accept()[0]
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as far:
            other = {near: far, far: near}
            with selectors.DefaultSelector() as ready:
                for end in other:
                    ready.register(end, selectors.EVENT_READ)
                while True:
                    for key, _ in ready.select():
                        end = key.fileobj
                        assert isinstance(end, socket.socket)
                        if not (data := end.recv(_CHUNK)):
                            return
                        other[end].sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepts.join()

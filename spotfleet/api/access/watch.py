"""Watching a fleet for long: one connection to the dispatcher for many polls, and access for Prometheus."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from spotfleet.api.fleet import READ_PATIENCE_S, Fleet
from spotfleet.errors import DispatcherUnreachable
from spotfleet.protocol.tokens import metrics_token
from spotfleet.storage import atomic
from spotfleet.transport.certs import SERVER_NAME
from spotfleet.transport.client import LogChunk, PersistentClient

TAIL_LINES = 500


class FleetWatch:
    """A fleet for a watcher. `poll` is for one thread; the other methods have connections of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._client: PersistentClient | None = None

    def poll(self, after: int | None, since: float) -> dict[str, Any]:
        """Return the answer of GET /v1/live. Raises DispatcherUnreachable; the next call looks for the dispatcher
        anew."""
        if self._client is None:
            self._client = PersistentClient(self._fleet.client.endpoint, patience_s=READ_PATIENCE_S)
        try:
            return self._client.live(after, since)
        except DispatcherUnreachable:
            self._client.close()
            self._client = None
            raise

    def log(self, job: str, rank: int, offset: int | None, wait_s: float) -> LogChunk:
        """Return a piece of a rank's log; without an offset its newest TAIL_LINES lines."""
        client = self._fleet.client
        start = client.log_start(job, rank=rank, tail=TAIL_LINES) if offset is None else offset
        return client.logs(job, start, rank=rank, wait_s=wait_s)

    def cancel(self, job: str) -> None:
        self._fleet.client.cancel(job)

    def drain(self, host: str) -> None:
        self._fleet.drain(host)


def scrape_config(fleet: Fleet) -> str:
    """Return the lines of prometheus.yml for the fleet. They name two files in the fleet's folder, which are written
    here: the token, which opens the metrics alone, and the certificate of the fleet's authority."""
    folder = fleet.home.find(fleet.name)
    url, files = urlsplit(fleet.client.endpoint.url), folder.path / "prometheus"
    atomic.make_folder(files)
    atomic.write(files / "token", metrics_token(folder.keys.fleet_secret))
    return f"""scrape_configs:
  - job_name: spotfleet-{fleet.name}
    scheme: https
    metrics_path: /metrics
    authorization: {{credentials_file: {files / "token"}}}
    tls_config: {{ca_file: {folder.path / "ca.pem"}, server_name: {SERVER_NAME}}}
    static_configs:
      - targets: ["{url.hostname}:{url.port}"]
"""

"""The metrics token, made by the dispatcher and on the laptop. Pure.

It opens `/metrics` and nothing else, from any machine: Prometheus keeps it in a file, where no admin token may lie.
"""

from __future__ import annotations

import hmac

from spotfleet.protocol.proofs import proof


def metrics_token(fleet_secret: str) -> str:
    return f"metrics:{proof(fleet_secret.encode(), 'metrics')}"  # a host's token has a dot, this one has none


def is_metrics_token(given: str, fleet_secret: str) -> bool:
    """Return whether `given` is the token of this fleet, in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), metrics_token(fleet_secret).encode())

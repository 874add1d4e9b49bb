"""Marks of a job's members on the checkpoints that they write. Pure.

Anybody with write access to a checkpoint target, or to an object store, can put files there. A mark is made with the
job's key, which only the dispatcher and the job's members hold, so it proves that a member wrote these bytes for this
job. It does not prove that the dispatcher keeps them: see `dispatcher/checkpoints/seals.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spotfleet.protocol.messages import Checkpoint


def proof(key: bytes, *content: Any) -> str:
    """Return the HMAC-SHA256 of JSON values in hex."""
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def is_proof(found: str, key: bytes, *content: Any) -> bool:
    return hmac.compare_digest(found.encode(errors="replace"), proof(key, *content).encode())


def identity(checkpoint: Checkpoint) -> list[Any]:
    """Return the fields that decide which bytes a checkpoint, or a part of one, consists of."""
    named = [checkpoint.name] if checkpoint.name else []  # earlier releases had none
    return [checkpoint.version, checkpoint.generation, checkpoint.digest, checkpoint.part, checkpoint.parts, *named]


@dataclass(frozen=True)
class MemberProof:
    """A member of a job, as it signs what it writes."""

    job: str = ""
    key: str = field(default="", repr=False)  # JOB_KEY of the job's secrets
    grant: str = ""  # that of the generation in which it writes: see `Assignment.grant`

    def marked(self, made: Checkpoint) -> Checkpoint:
        """Return a checkpoint, or a part, with this member's mark and the grant of its generation."""
        if not self.key:
            return made
        return replace(made, grant=self.grant, mark=proof(self.key.encode(), "checkpoint", self.job, identity(made)))

    def has_marked(self, made: Checkpoint) -> bool:
        """Return whether a member of this job wrote the checkpoint."""
        return bool(self.key) and is_proof(made.mark, self.key.encode(), "checkpoint", self.job, identity(made))

    def of_manifest(self, manifest: Mapping[str, Any]) -> str:
        """Return the mark of a manifest in an object store; its own field `mark` does not count."""
        return proof(self.key.encode(), "manifest", self.job, _content(manifest)) if self.key else ""

    def has_manifest(self, manifest: Mapping[str, Any], mark: str) -> bool:
        """Return whether a member of this job wrote the manifest."""
        return bool(self.key) and is_proof(mark, self.key.encode(), "manifest", self.job, _content(manifest))


def _content(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != "mark"}

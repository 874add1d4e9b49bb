"""Seals on checkpoints, by which a dispatcher recognises what this fleet's dispatchers have kept. Pure.

Hosts write to the checkpoint target too, and a compromised one may put anything there. Three proofs decide what counts:

    grant   of a generation of a job, sent with the order to form it. Checkpoints return it: it proves, also to a
            dispatcher that has just taken over, that the generation was ordered.
    mark    by a member of the job, on what hosts without a dispatcher left in quarantine (`protocol/proofs.py`)
    seal    on the record of a checkpoint that a dispatcher has judged, with a serial number that only grows

    arrives from a host of the job ---its generation was ordered--> sealed, kept here, copied to the target
    arrives at the target, by its hosts --the manifest's mark and grant are right--> sealed there
    lies in quarantine at the target --mark and grant are right--^
    lies among the kept ones at the target: counts with a right seal whose number is not below the job's floor

The floor is the lowest number at the target after the last copy: an older one was removed there, so its return is a
rollback. Numbers begin with that of the dispatcher's machine, so they grow through every takeover. The key is derived
from the fleet's secret, which travels as before: laptop and dispatchers hold it, hosts do not.

A job that was submitted to a release without seals has none on its old checkpoints: they count as before, as long as
the target has no sealed one of the job (`JobRecord.seals`). To be removed two releases after 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.protocol.checkpoint_files import CheckpointManifest
from spotfleet.protocol.messages import JOB_KEY, Checkpoint
from spotfleet.protocol.proofs import MemberProof, identity, is_proof, proof

PER_MACHINE = 10**9  # serial numbers of one dispatcher's machine


class SealKey:
    """Key of one fleet's grants and seals."""

    def __init__(self, fleet_secret: str) -> None:
        self._key = HKDF(SHA256(), 32, salt=None, info=b"spotfleet checkpoints").derive(fleet_secret.encode())

    def grant(self, job: str, generation: int) -> str:
        return proof(self._key, "grant", job, generation)

    def has_granted(self, job: str, generation: int, grant: str) -> bool:
        return bool(grant) and is_proof(grant, self._key, "grant", job, generation)

    def sealed(self, job: str, made: Checkpoint, serial: int) -> Checkpoint:
        return replace(made, serial=serial, seal=proof(self._key, "seal", job, identity(made), made.url, serial))

    def has_sealed(self, job: str, made: Checkpoint) -> bool:
        return bool(made.seal) and is_proof(made.seal, self._key, "seal", job, identity(made), made.url, made.serial)


class JobSeals:
    """Grants and seals of one job."""

    def __init__(self, key: SealKey, machine: int, record: Callable[[], JobRecord],
                 secrets: Callable[[], dict[str, str]]) -> None:
        """`machine`: the number of the dispatcher's machine. `record`, `secrets`: the job's, as they are now."""
        self._key, self._record, self._secrets = key, record, secrets
        self._serial = machine * PER_MACHINE  # the highest known
        self._grants: dict[int, str] = {}

    def grant(self, generation: int) -> str:
        """Return the proof that this generation was ordered."""
        if generation not in self._grants:
            self._grants = {generation: self._key.grant(self._record().job, generation)}  # each order repeats it
        return self._grants[generation]

    def was_ordered(self, made: Checkpoint) -> bool:
        """Return whether a dispatcher of this fleet ordered the generation in which the checkpoint was made."""
        record = self._record()
        return (made.generation <= record.ordered or not record.seals
                or self._key.has_granted(record.job, made.generation, made.grant))

    def note(self, serial: int) -> None:
        """Give no serial number up to this one."""
        self._serial = max(self._serial, serial)

    def sealed(self, made: Checkpoint) -> Checkpoint:
        """Return the checkpoint that is to be kept, with a seal; one that has a right seal stays as it is."""
        record, plain = self._record(), replace(made, grant="", mark="")
        if made.url and not record.seals:
            return plain  # its workers put no marks on what lies beside it, and take the seal for a sign that they do
        if self._key.has_sealed(record.job, plain):
            self.note(made.serial)
            return plain
        self._serial = max(self._serial, record.floor) + 1
        return self._key.sealed(record.job, plain, self._serial)

    @property
    def takes_unsealed(self) -> bool:
        """Whether the job was submitted to a release that made no seals."""
        return not self._record().seals

    def problem(self, made: Checkpoint) -> str:
        """Return why a record at the target does not count, as a clause; "" if it does."""
        record = self._record()
        if not self._key.has_sealed(record.job, made):
            return f"its record carries no seal of this fleet's dispatcher for {record.job}"
        if made.serial < record.floor:
            return f"its seal {made.serial} is older than {record.floor}: newer ones had replaced it"
        return ""

    def problem_in_manifest(self, found: CheckpointManifest) -> str:
        """Return why a manifest that hosts have written to the target does not count, as a clause; "" if it does."""
        record = self._record()
        if not MemberProof(record.job, self._secrets().get(JOB_KEY, "")).has_manifest(found.content, found.mark):
            return f"it carries no mark of a worker of {record.job}"
        made = Checkpoint(found.version, "", 0, found.generation, grant=found.grant)
        return "" if self.was_ordered(made) else unordered(made)

    def problem_in_quarantine(self, made: Checkpoint) -> str:
        """Return why something that hosts without a dispatcher left does not count, as a clause; "" if it does."""
        record = self._record()
        if not MemberProof(record.job, self._secrets().get(JOB_KEY, "")).has_marked(made):
            return f"it carries no mark of a worker of {record.job}"
        return "" if self.was_ordered(made) else unordered(made)


def unordered(made: Checkpoint) -> str:
    return f"no dispatcher of this fleet has ordered its generation {made.generation}"

"""Checkpoints in quarantine at the target, as a host without a dispatcher leaves them, and as an intruder would."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from spotfleet.dispatcher.checkpoints.seals import SealKey
from spotfleet.protocol.messages import JOB_KEY, Checkpoint, dump
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage.folder import FolderStore, fleet_store, quarantine_name, record_name
from tests.support.dispatcher.checkpoint_sets import sha, whole
from tests.support.dispatcher.fake_fleet import Stage


def target_folder(stage: Stage) -> FolderStore:
    return fleet_store(stage.boot.spec.checkpoint.target, stage.boot.fleet, stage.boot.ca)


def point(version: int, data: bytes, generation: int = 1, part: int = 0, parts: int = 1) -> Checkpoint:
    return Checkpoint(version, hashlib.sha256(data).hexdigest(), len(data), generation, part=part, parts=parts)


def member(stage: Stage, job: str, generation: int = 1) -> MemberProof:
    """A worker of the job in a generation that was ordered."""
    secrets = stage.daemon.dispatcher.core.jobs[job].secrets
    return MemberProof(job, secrets[JOB_KEY], SealKey(stage.boot.fleet_secret).grant(job, generation))


def left_there(stage: Stage, job: str, made: Checkpoint, data: bytes, proof: MemberProof | None = None) -> None:
    """Put a checkpoint, or a part, into quarantine, with the proof of a worker unless another one is given."""
    proof = proof or member(stage, job, made.generation)
    name = quarantine_name(job, made)
    target_folder(stage).put(name, [data])
    target_folder(stage).put(record_name(name), [dump(proof.marked(made)).encode()])


def left_files(stage: Stage, job: str, files: dict[str, bytes], but: str = "", wrong: str = "") -> None:
    """Put the files of a checkpoint into quarantine, as the hosts of its writers do; without one, or one wrong."""
    made = whole(files)
    for name, data in files.items():
        if name != but:
            piece = replace(made, name=name, digest=sha(data))
            target_folder(stage).put(quarantine_name(job, piece), [data + b"?" if name == wrong else data])
    record = dump(member(stage, job, made.generation).marked(made))
    target_folder(stage).put(record_name(quarantine_name(job, made)), [record.encode()])

"""Checkpoints that the dispatcher keeps, and their copies at the checkpoint target.

    store.py         checkpoints of one job on the disk      parts.py            those that several ranks write, joined
    replica.py       their copies at the target              last_copy.py        is progress lost with the last holders?
    seals.py         which of them count, by proofs
    maintenance.py   slow work on all of these, beside the loop
    backup.py        ledger, jobs and bundles at the target  ledger_restore.py   the same, read back
    archive.py       the results of an ended fleet           archive_files.py  the same as a manifest and keys
"""

"""Checkpoints that the dispatcher keeps, and their copies at the checkpoint target.

    store.py         checkpoints of one job on the disk      parts.py            their files as they arrive
    replica.py       their copies at the target              target_folder.py    one job's folder there
    seals.py         which of them count, by proofs          last_copy.py        is progress lost with the last holders?
    maintenance.py   slow work on all of these, beside the loop
    backup.py        ledger, jobs and bundles at the target  ledger_restore.py   the same, read back
    archive.py       the results of an ended fleet           archive_files.py  the same as a manifest and keys
"""

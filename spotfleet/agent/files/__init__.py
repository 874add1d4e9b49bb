"""Files of one host's jobs: bundles and buckets in; logs, outputs and checkpoints out.

    bundles.py   launch and working directory of a job     blobs.py    pieces of working directories on the disk
    setup.py     a job's setup, before its first worker    mounts.py   buckets, by a process: mount_process.py
    uploads.py   logs and checkpoints, sent                outputs.py  output folders, sent
    checkpoint_downloads.py   the checkpoint that workers restore
"""

"""Checkpoints: each rank's shard, written in the background and restored on any number of ranks.

`exchange.py`: reports of written parts to rank 0. `peers.py`: files that hosts send each other before a restore.
"""

"""Checkpoints: each rank's shard, written in the background and restored on any number of ranks."""

"""Checkpoints that the dispatcher keeps, and their copies at the checkpoint target."""

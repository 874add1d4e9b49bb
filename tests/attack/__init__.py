"""Attacks on a running fleet: hostile input, kills, full disks, odd names, other users of the machine.

One test is one kind of attack, drawn from a seed. It prints "kind, seed: tried N, kept N, broken N" and names each
promise that broke; it fails if there is one. `scripts/test --attack` runs all kinds, `SPOTFLEET_ATTACK_SEED=S` repeats
one run's choices, `SPOTFLEET_LONG=1` (set by `--long`) takes more seeds and more strokes. Kinds that need a running
fleet share one for each file, so that its start is paid once.
"""

"""Proof that a user's script survives changes of membership bit for bit, on this machine's CPUs, without a fleet.

    undisturbed --again--> the same? --kill, notice, late join, restore--> the same?
         `world.py`: real workers, the real decisions       '-- `compare.py`: the first difference --> `causes.py`

Each run is a job of its own, on a fixed number of workers: a lost one is replaced, so that every step runs on as many.
The workers record digests of each version (`train/watch.py`). `python -m spotfleet.verify SCRIPT` is the command, also
as `python -m spotfleet.train.verify` and `spotfleet train --verify`.
"""

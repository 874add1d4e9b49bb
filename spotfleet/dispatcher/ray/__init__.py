"""Ray cluster of the fleet, on the dispatcher's side. Nothing here imports Ray.

    cluster.py   which job holds hosts for Ray, what its hosts' raylets need, drains, status
    leaving.py   which hosts leave, and until when their raylets stay. Pure
    head.py      the head's supervisor (`ray/cluster/head.py`): started, followed, ended
    trials.py    trials of Ray Tune, for the bill
    drivers.py   scripts of `spotfleet ray submit`, which run beside the head
"""

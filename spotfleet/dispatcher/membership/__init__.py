"""Which workers of one job train, with which ranks. Pure: no clock, socket, thread, file, random number.

`views.py`: what comes in and goes out. `machine.py`: the decisions, and the diagram. `fence.py`: never two at once.
"""

from spotfleet.dispatcher.membership.machine import Membership
from spotfleet.dispatcher.membership.views import (
    Change,
    Evicted,
    Finished,
    Formed,
    Ordered,
    Orders,
    Phase,
    Tuning,
    WorkerView,
)

__all__ = [
    "Change",
    "Evicted",
    "Finished",
    "Formed",
    "Membership",
    "Ordered",
    "Orders",
    "Phase",
    "Tuning",
    "WorkerView",
]

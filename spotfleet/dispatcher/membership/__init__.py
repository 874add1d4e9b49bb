"""Which workers of one job train, with which ranks. Pure: no clock, socket, thread, file, random number.

`views.py`: what comes in and goes out. `machine.py`: the decisions. `fence.py`: never two at once. `watchdog.py`:
who hangs. `pace.py`: how fast the membership may change by our own choice.

A *generation* is one agreed membership. `observe` is level-triggered: it may be called at any time, with any delay.

                 min reached, all started           every member holds it
    STARTING ------------------------------> FORMING ---------------------> RUNNING
                                               |  ^                          |   |
                  too few workers, or no fence |  | enough, and fenced       |   | one worker has finished
                                               v  |    death, failure        |   v
                                              HOLDING <----------------------+  FINISHED
                                                       (join, notice, drain: FORMING again)

What each state waits for is in `why`; what frees it if that never comes:
- STARTING: `start_settle_s` once min is reached; below min only more workers (the schedule gives hosts).
- FORMING: a death of a member; a failure reported (`failure_grace_s`); `form_timeout_s`, doubled for each failure in a
  row. Members that did not form are evicted; where nobody formed, one member after `max_failures`. While an old group
  still trains towards the boundary of a planned change, nothing is late; it is aborted if a leaver in it falls silent.
- RUNNING: a hang: see `watchdog.py`. Where all ranks are in the user's own code nothing ends it: `why` tells for how
  long no step was made. A member that is stopped (SIGSTOP, a debugger) counts as lost after `stopped_grace_s`.
- HOLDING: more READY workers; a member that was silent or stopped comes back (nothing was ordered, so it goes on); or
  the provider's word that it has gone. Whoever is stopped for `stopped_limit_s` is evicted. A founder that hangs in
  init() is evicted after `form_timeout_s`; one that hangs before that in the user's code is waited for.
- FINISHED: stragglers are evicted after `finish_timeout_s`.

Never two training at once: a step needs all ranks of its generation, so a group can be dropped without its consent
only if one of its members is in the new generation, has confirmed to have left it, or is confirmed dead.
"""

from spotfleet.dispatcher.membership.machine import Membership
from spotfleet.dispatcher.membership.pace import Pace
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
    "Pace",
    "Phase",
    "Tuning",
    "WorkerView",
]

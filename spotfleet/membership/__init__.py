"""Membership of one job: which workers train, with which ranks. Pure: no clock, socket, thread, file, random number.

`desk.py`: the loop that every caller runs. `views.py`: input and output values. `machine.py`: decisions. `fence.py`:
never two groups at once. `watchdog.py`: hang detection. `quiet.py`: time without progress. `pace.py`: limits on changes
by our own choice. `places.py`, `prediction.py`: which rank a spare gets.

A *generation* is one agreed membership. `observe` is level-triggered: it may be called at any time, with any delay.

                 min reached, all started           every member holds it
    STARTING ------------------------------> FORMING ---------------------> RUNNING
                                               |  ^                          |   |
                  too few workers, or no fence |  | enough, and fenced       |   | one worker has finished
                                               v  |    death, failure        |   v
                                              HOLDING <----------------------+  FINISHED
                                                       (join, notice, drain: FORMING again)

`why` gives what each state waits for. These events free it:
- STARTING: `start_settle_s` once min is reached; below min only more workers (the schedule gives hosts).
- FORMING: the death of a member; a reported failure (`failure_grace_s`); `form_timeout_s`, doubled for each failure in
  a row. Members that did not form are evicted; if none formed, one member after `max_failures`. While an old group
  still trains towards the boundary of a planned change, no timeout runs; the group is aborted if a leaver in it falls
  silent.
- RUNNING: a hang: see `watchdog.py`. Nothing ends a generation whose ranks are all in the user's own code: `why` gives
  the time without a step. A stopped member (SIGSTOP, a debugger) counts as lost after `stopped_grace_s`.
- HOLDING: more READY workers; the return of a silent or stopped member (nothing was ordered, so it goes on); or the
  provider's report that it has gone. A member stopped for `stopped_limit_s` is evicted. A founder that hangs in init()
  is evicted after `form_timeout_s`; there is no limit for one that hangs before that in the user's code.
- FINISHED: stragglers are evicted after `finish_timeout_s`.

Two groups never train at once: a step needs all ranks of its generation, so a group can be dropped without its consent
only if one of its members is in the new generation, has confirmed to have left it, or is confirmed dead.
"""

from spotfleet.membership.machine import Membership
from spotfleet.membership.pace import Pace
from spotfleet.membership.views import Change, Evicted, Finished, Formed, Ordered, Orders, Phase, Tuning, WorkerView

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

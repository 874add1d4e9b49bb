"""The Python API. The CLI is a thin shell over it.

    fleet.py     Fleet: the one class to start from      job.py      Job: a handle of one job
    up.py        fleet file -> hosts                     preview.py  what `up` will do and cost, before it does
    train.py     script -> job                           down.py     bring home, end, prove
    machine.py   the dispatcher's machine                reports.py  status, events and cost, also after the end
    house.py     SPOTFLEET_HOME                          offers.py   what is on sale, by providers and catalog
"""

from spotfleet.api.fleet import Fleet
from spotfleet.api.job import Job

__all__ = ["Fleet", "Job"]

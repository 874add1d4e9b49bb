"""The Python API. The CLI is a thin shell over it.

    fleet.py     Fleet: the one class to start from      job.py      Job: a handle of one job
    lifecycle/   up, down, attach and the plan of `up`   train.py    script -> job
    machine.py   the dispatcher's machine                cloud.py    provider configuration, region of a new fleet
    home.py      SPOTFLEET_HOME                          reports.py  status and events, also after the fleet's end
    access/      SSH from the laptop to the machines     account/    listings of accounts, leaks, bases, images
    costs.py     ledgers of one fleet or all             outputs.py  files that workers wrote
    check.py     checks before a fleet is made           offers.py   offers of providers and the catalog
    policies.py  IAM policies                            transfers.py  the dispatcher's files on their way here
"""

from spotfleet.api.fleet import Fleet
from spotfleet.api.job import Job

__all__ = ["Fleet", "Job"]

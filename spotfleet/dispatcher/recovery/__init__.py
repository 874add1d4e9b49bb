"""Start of a dispatcher: a new fleet, a restart of its process, or a takeover after its machine was lost.

    process lost   the next process reads the disk (`jobs/desk.py: load_job`). It waits until all hosts have reported,
                   at most SETTLE_S (`dispatcher.py`). If an agent reports a later generation than the disk holds, the
                   dispatcher requests it: `AgentOrders.tell` -> `AgentReport.held`.
    file damaged   it is set aside (`disk/damage.py`). A job of the ledger without its file is requested from its hosts,
                   or made again from the ledger, or has failed as lost (`lost_jobs.py`).
    machine lost   `spotfleet up` launches another machine with the same keys. Its dispatcher
                   1. restores ledger and jobs from the checkpoint target (`checkpoints/ledger_restore.py`),
                   2. finds the hosts in the cloud's listing (`first_start.py`: event `TakenOver`),
                   3. tags the hosts with its URL (`cloud/endpoint_tag.py`); agents read the tag (`agent/endpoint.py`),
                   4. makes jobs from the data that agents hold (`job_adoption.py`, `takeover.py`).

Agents leave the workers of a job alone until it is adopted. After a takeover the dispatcher adopts unknown jobs for
ADOPT_S (`job_adoption.py`) only.
"""

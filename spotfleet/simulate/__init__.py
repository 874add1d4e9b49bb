"""Fleets on recorded spot markets under a virtual clock: the product's own policy and planner beside other strategies.

    trace.py      what a record of a market is
    read.py       records from files, in the formats of formats/
    tariff.py     what hosts cost in it                      measured.py   how long this release itself takes
    cloud.py      a cloud made of records                    ledger.py     a ledger in memory
    work.py       training, as host-seconds
    world.py      one fleet on one window: jumps from one instant that matters to the next
    deciding.py   who decides: our policy as the dispatcher asks it, and others (baselines.py)
    run.py        every window under every strategy          story.py      one window in detail
    spread.py     runs on all cores
    ask.py        from a fleet file and wishes to a plan     result.py     what was found
    windows.py    smaller worlds, for thousands of pieces    foresight.py  what cannot be undercut (`bench/policy.py`)
"""

"""Simulation of fleets on recorded spot markets: the product's own policy and planner beside other strategies.

    request.py     fleet file and options -> a plan       run.py         every window under every strategy
    read.py        records from files, see formats/       parallel.py    parallel processes
    tariff.py      prices of hosts                        narrative.py   one window in detail
    constants.py   durations measured for this release    values/        records and results
    world/         one fleet on one window, under a virtual clock that jumps to the next relevant instant:
                   cloud.py a cloud made of records, work.py training as host-seconds, deciders.py the choices
    strategies/    the strategies for comparison

`bench/policy_worlds.py` has smaller worlds for thousands of pieces, `bench/policy_foresight.py` lower bounds.
"""

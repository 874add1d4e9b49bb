"""Fleet state and its values, below planner and policy. Pure.

    events.py        event kinds of the ledger
    state.py         `FleetState`, folded from those events; host.py: one host in it
    history.py       spot capacity, boots, stalls and job progress, folded beside it
    availability.py  periods in which spot hosts were available or not
    actions.py       input and output of the planner
    step_cost.py     explanation of the time that a training step takes
    copies.py        faster copies of frozen values
"""

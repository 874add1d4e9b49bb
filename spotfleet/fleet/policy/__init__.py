"""Market policy: number of spot and on-demand hosts, and their pools, by price, availability, deadline, budget. Pure.

    values.py    input and result of a decision
    decide.py    the rule that applies (spot, auto, on-demand, base) and its choice; deadline.py: the one for a deadline
    lifetimes.py life of hosts in a pool, boot time; pools.py: cost of a useful hour there
    mix.py       the hosts of each market, each with its own number
    budget.py    end of a fleet with a limit on its cost
"""

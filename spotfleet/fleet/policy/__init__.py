"""How many hosts of which market, and in which pools: by price, availability, deadline and budget. Pure.

    values.py    what a decision is made from, and what it is
    decide.py    spot, auto, on-demand, base: which rule holds, and its choice; deadline.py the choice for a deadline
    seen.py      what the ledger tells of the past; memory.py: of availability
    lifetimes.py how long hosts last in a pool, how long they boot; pools.py: what an hour there is worth
    mix.py       the hosts of either market, each with its own number
    budget.py    when a fleet with a limit on its cost must end
"""

"""Fleet of machines: its events, the plan for its hosts, and the reconciler that carries the plan out.

    domain/           events and the state folded from them. Pure
    planner/          which hosts should exist. Pure
    policy/           spot or on demand, deadlines and budgets. Pure
    cost/             cost, from the ledger's events. Pure
    ledger.py         append-only sqlite file of events; memory_ledger.py: the same in memory
    reconcile.py      one cycle: observe, plan, write the intent, act
"""

"""Dispatcher, the daemon of a fleet: launches hosts, forms generations, and keeps jobs, checkpoints and the ledger.

    daemon.py        start and end of the server, the loop and the background tasks
    dispatcher.py    the loop; core.py: state that its parts share
    hosts.py         views of hosts, from agents' reports and the ledger; reports.py: validation of these reports
    agent_orders.py  orders to agents
    fleet_desk.py    requests about the fleet and its hosts; status.py: the fleet's status
    policy.py        calls of the pure policy, and the budget
    journal.py       access to the ledger from the event loop
    signal.py        change notification on the event loop
    http/            server, authentication and routes
    jobs/            submission, slots, orders to workers, restarts, progress
    checkpoints/     checkpoints kept here, and their copies at the checkpoint target
    cloud/           hosts, notices, outages and costs at the provider
    recovery/        first start, restart and takeover
    lifecycle/       idle and age limits, shutdown, clock, health
    disk/            bundles, logs, outputs, free space
"""

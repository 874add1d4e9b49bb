"""Live views of a running fleet, for the page, Prometheus and notifications. They read; they decide nothing.

    series.py    a job's progress and interruptions over time, bounded
    slow.py      workers that are slower than the others
    history.py   task that keeps both, and counters, from the ledger and from the jobs
    metrics.py   the status and the counters as OpenMetrics text
    notices.py   which events are notified, with what text
    notify.py    task that delivers notifications
"""

"""Supervision of one host's workers.

    supervisor.py   which workers run       worker.py     life cycle of one, up to the report of its end
    sockets.py      reports and orders      liveness.py   stopped or silent processes
"""

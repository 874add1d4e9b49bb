"""Supervision of one host's workers: life cycle, sockets, liveness."""

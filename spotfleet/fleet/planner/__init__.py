"""Planner of the hosts that should exist: plan, choice of pools, number of hosts. Pure."""

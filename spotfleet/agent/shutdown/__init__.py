"""Shutdown of a host that is orphaned, too old or refused; saves the jobs' state first.

    controller.py   the steps of the shutdown     stash.py   checkpoints that it keeps and copies to the target
"""

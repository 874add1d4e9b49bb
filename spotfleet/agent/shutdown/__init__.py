"""Shutdown of a host that is orphaned, too old or refused; saves the jobs' state first."""

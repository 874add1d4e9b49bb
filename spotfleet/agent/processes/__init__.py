"""Processes on a host: the zygote that forks them, their environment, the code in a new worker."""

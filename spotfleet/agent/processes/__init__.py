"""Processes on a host or in a container: the zygote that forks them, their environment, the code in a new worker."""

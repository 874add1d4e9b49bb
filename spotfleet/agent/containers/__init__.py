"""Containers in which the workers of a job run, while the agent stays outside. One container for each job on a host.

    engines.py          command lines of Docker, Podman and runc. Pure
    refusals.py         meaning of an engine's error messages. Pure
    container.py        one container: start, processes, end
    host_containers.py  containers of this host: engine, image, start; removal of orphans of an earlier agent

The first process of a container reads from a FIFO that only the agent holds open for writing. Once the agent closes it,
or is killed, that process ends, the kernel ends every other process of the container's PID namespace, and the engine
removes the container. Folders are mounted under the paths that they have on the host, so no variable needs another
value inside. Network and shared memory are the host's.

Scripts are forked from a zygote in the container, with the image's Python and torch and this host's spotfleet. Shell
commands need no Python: the engine's client enters the container for each (`processes/entered.py`).
"""

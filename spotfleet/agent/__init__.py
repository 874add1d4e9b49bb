"""Agent, the daemon on a host: runs the workers that the dispatcher orders, and reports their state.

    daemon.py    creates the components, connects them and runs them; boot.py: configuration of a host
    link.py      connection to the dispatcher: reports out, orders in; endpoint.py: the dispatcher's URL
    stages.py    durations of the parts of this host's boot
    transfer.py  HTTPS requests for launches, files and logs; target_copies.py: checkpoints at a mounted target
    notices.py   watch of the host's metadata server
    address.py   address at which peers reach this host
    disk.py      check for a full disk; gpus.py: watch of the host's GPUs
    workers/     life cycle, sockets and liveness of the workers
    processes/   the zygote, which forks workers; their environment
    containers/  the containers in which workers run, for jobs with an image
    files/       bundles and buckets in; logs, outputs and checkpoints out
    policy/      decision when the host ends itself. Pure
    shutdown/    end of a host that is orphaned, too old or refused
"""

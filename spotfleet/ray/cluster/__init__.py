"""Ray cluster on a fleet: the processes that run Ray on its machines.

    dispatcher --starts, RayWish--> head.py --supervises--> `ray start --head`: GCS and a raylet without CPUs
               <------RayReport---    |--> observer.py: the cluster's state, drains; with the private calls of gcs.py
                                      '--> drivers of `spotfleet ray submit`
    agent --job of kind "ray"--> raylet.py --supervises--> `ray start --address`: one raylet per host

Where the dispatcher is root, what head.py starts is another user's (`account.py`). head.py and raylet.py import no Ray,
so that they start fast and outlive what Ray does. Everything that they start has the folder of its cluster in its
environment (`processes.py`), by which all of it is found and ended. The dispatcher's side is `dispatcher/ray/`, the
messages are in `protocol/ray_cluster.py`.
"""

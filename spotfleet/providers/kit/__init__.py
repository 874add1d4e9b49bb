"""Kit: the parts of a cloud's provider that do not depend on the cloud. Every provider of virtual machines uses them.

    cache.py       answers remembered for some time; one thread asks, the others wait
    requests.py    several requests at once, and no more in a second than the cloud takes
    userdata.py    user data of a machine, made for a launch and read back
    mapping/       pure:
        names.py       tags, tokens of launches, hosts launched together
        errors.py      error code -> scope and reaction, from a table
        prices.py      decimal dollars and price histories -> ours

Nothing here knows an SDK. A cloud passes its own calls in, as functions.
"""

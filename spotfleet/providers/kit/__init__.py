"""Kit: the parts of a cloud's provider that do not depend on the cloud. A provider of virtual machines stands on it.

    plugin.py      plugin of a cloud with regions: a new fleet takes the cheapest, and stays there
    settings.py    the configuration of a provider, parsed, as far as all clouds share it
    launching.py   steps of a launch that any process may repeat
    offers.py      pools for a need, the cheapest region
    checks.py      checks before a first fleet, all at once
    laptop.py      this laptop's address and the name on its firewall rules
    userdata.py    user data of a machine, made for a launch and read back
    images.py      ready images: their tags, the newest one, remarks, Packer's values
    cache.py       answers remembered for some time; one thread asks, the others wait
    requests.py    several requests at once, and no more in a second than the cloud takes
    mapping/       pure:
        names.py       tags, tokens of launches, hosts launched together
        errors.py      error code -> scope and reaction, from a table
        listing.py     machines -> one line per host, intruders apart
        types.py       machine types that satisfy a need; words for a need that none can satisfy
        prices.py      decimal dollars and price histories -> ours
        quotas.py      whether a region's quotas hold a fleet

Nothing here knows an SDK. A cloud passes its own calls in, as functions or as the steps of an object.
"""

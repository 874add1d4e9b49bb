"""The finite cloud under every fake of a cloud: what has limits, takes time, fails, and takes machines back.

    cloud.py      `FiniteCloud`: the clock, what falls due, threads, and the runner whose machines really run
    market.py     `Pools`: room, spot prices with their history, quotas
    machines.py   `Machine` with its history of states, `MachineLife` from boot to end, notices
    requests.py   `Call`, `Fault`, `RequestScript`: the log of requests, faults by pattern, lost answers, rate limits

A fake is the cloud's API in front of it: it reads requests, calls these, and answers as the cloud's protocol says. It
adds only what its cloud alone has, such as EC2's spot requests (`fakes/aws`).
"""

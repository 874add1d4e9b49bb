"""Records of spot markets in the formats of other projects, one file per format. `simulate/read.py` detects the format.

    trace.py      the record that each of them becomes
    pings.py      JSON `{"metadata": {"gap_seconds": 600}, "data": [1, 0, ...]}`, as in SkyPilot's spot-traces; the
                  windows of Frontier-CS look alike and are inverted; a .tar.gz of either
    members.py    hosts that joined and left: Bamboo's CSV, Parcae's JSON lines, Bamboo's list of counts
    probes.py     logs of attempts to hold an instance, as in training_on_a_dime
    prices.py     AWS's spot price history, Azure's daily prices, a log of GCP's price changes
"""

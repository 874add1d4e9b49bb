"""Ray Tune over elastic trials: each trial's workers join and leave while it trains.

    sizes.py    how many workers each trial may have: pure rules, and the actor that holds them
"""

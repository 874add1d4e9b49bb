"""Parts of the attacks in tests/attack: counts, live fleets, scripts."""

"""Cost of a fleet, a pure function of its ledger."""

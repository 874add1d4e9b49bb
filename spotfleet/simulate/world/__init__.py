"""The simulated cloud and the work that runs on it."""

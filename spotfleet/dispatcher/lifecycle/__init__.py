"""The fleet's life: idle and age limits, shutdown, results that hosts still hold, clock, health."""

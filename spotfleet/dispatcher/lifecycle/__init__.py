"""The fleet's life: idle and age limits, shutdown, clock, health."""

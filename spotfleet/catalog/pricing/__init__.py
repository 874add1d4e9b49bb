"""Prices of machine types, and the cost of an hour of useful work. Pure."""

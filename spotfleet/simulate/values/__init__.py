"""Traces and results of a simulation. Pure."""

"""Conversion between our terms and those of Compute Engine. Pure."""

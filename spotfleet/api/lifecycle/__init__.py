"""`up`, `down` and `attach`: start and end of a fleet, as seen from the laptop."""

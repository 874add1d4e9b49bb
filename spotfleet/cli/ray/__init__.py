"""`spotfleet ray`: the Ray cluster of a fleet."""

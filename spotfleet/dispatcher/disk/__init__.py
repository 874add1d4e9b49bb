"""Files on the dispatcher's disk: bundles, logs, outputs, free space."""

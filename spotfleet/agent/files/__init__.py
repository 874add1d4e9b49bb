"""Files of one host's jobs: bundles and buckets in; logs, outputs and checkpoints out."""

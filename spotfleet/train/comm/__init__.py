"""One generation's process group: gloo, NCCL, and the client of the bootstrap store that they use."""

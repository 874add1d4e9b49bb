"""Distributed optimizers and the reduction of their gradients.

    optimizer.py       DistributedOptimizer: the user's own optimizer, with averaged gradients
    optimizer_tag.py   what states and checkpoints know of one; the list of those in use
    reducer.py         reduction while backward runs; `buckets.py` lays the memory out
    positions.py       check that all ranks are at one position, made in each reduction
    micro.py           splits a batch into microbatches
"""

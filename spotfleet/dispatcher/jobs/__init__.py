"""Jobs of the dispatcher: submission, slots, orders to workers, restarts, progress."""

"""Samplers and streams that yield each sample once per epoch through any change of workers."""

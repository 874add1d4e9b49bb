"""Stand-in for torchvision: the same names, small models, files of the same formats."""

from torchvision import datasets, models, transforms

__all__ = ["datasets", "models", "transforms"]

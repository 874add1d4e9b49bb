"""Models under the names of large ones, with a few thousand parameters and with BatchNorm."""

from __future__ import annotations

from torch import nn


def resnet18(num_classes: int = 1000) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                         nn.Flatten(), nn.Linear(16, num_classes))


resnet50 = resnet18

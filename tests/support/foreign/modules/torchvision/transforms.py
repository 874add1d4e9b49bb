"""Transforms of images, which are arrays of uint8 (channels, height, width) until `ToTensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional


class Compose:
    def __init__(self, steps: list[Callable[..., Any]]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> Any:
        return torch.from_numpy(np.array(image)).float() / 255


class Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self.mean, self.std = (torch.tensor(v).reshape(-1, 1, 1) for v in (mean, std))

    def __call__(self, image: Any) -> Any:
        return (image - self.mean) / self.std


class Resize:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        tensor = torch.from_numpy(np.array(image)).float()[None]
        return functional.interpolate(tensor, (self.size, self.size))[0].to(torch.uint8).numpy()


class CenterCrop(Resize):
    def __call__(self, image: Any) -> Any:
        top, left = ((n - self.size) // 2 for n in image.shape[1:])
        return image[:, top:top + self.size, left:left + self.size]


class RandomResizedCrop(Resize):
    def __call__(self, image: Any) -> Any:
        side = max(2, int(image.shape[1] * (0.3 + 0.7 * float(torch.rand(())))))
        top, left = (int(torch.randint(n - side + 1, ())) for n in image.shape[1:])
        return super().__call__(image[:, top:top + side, left:left + side])


class RandomHorizontalFlip:
    def __call__(self, image: Any) -> Any:
        return image[:, :, ::-1] if torch.rand(()) < 0.5 else image

"""Data sets of images: MNIST from idx files, folders of one class each (.npy instead of .png), and invented images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class _Images(Dataset):
    def __init__(self, images: Any, labels: Any, transform: Callable[..., Any] | None) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (self.transform(image) if self.transform else image), int(self.labels[index])


class MNIST(_Images):
    def __init__(self, root: str, train: bool = True, transform: Callable[..., Any] | None = None,
                 download: bool = False) -> None:
        name = "train" if train else "t10k"
        raw = Path(root) / "MNIST" / "raw"
        super().__init__(_idx(raw / f"{name}-images-idx3-ubyte")[:, None], _idx(raw / f"{name}-labels-idx1-ubyte"),
                         transform)


class ImageFolder(_Images):
    def __init__(self, root: str, transform: Callable[..., Any] | None = None) -> None:
        classes = sorted(p for p in Path(root).iterdir() if p.is_dir())
        found = [(np.load(p), number) for number, folder in enumerate(classes) for p in sorted(folder.glob("*.npy"))]
        super().__init__([image for image, _ in found], [label for _, label in found], transform)


class FakeData(Dataset):
    def __init__(self, size: int, image_size: tuple[int, ...], num_classes: int,
                 transform: Callable[..., Any] | None = None) -> None:
        self.size, self.image_size, self.classes = size, image_size, num_classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        draws = torch.Generator().manual_seed(index)
        image = torch.rand(self.image_size, generator=draws)
        return image, int(torch.randint(self.classes, (1,), generator=draws))


def _idx(path: Path) -> Any:
    data = path.read_bytes()
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)

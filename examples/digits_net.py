"""The model, data and order of samples for digits.py and its reference run. It does not use spotfleet."""

from __future__ import annotations

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH = 48  # over all workers, whatever their number: the learning curve does not depend on the world size
LEARNING_RATE = 5e-3
TEST_SAMPLES = 360


class Net(nn.Module):
    """Convolutional network from images (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def make() -> tuple[Net, torch.optim.Optimizer]:
    """Make the same untrained model and optimizer in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load scikit-learn's handwritten digits: 1437 training and 360 test images (N, 1, 8, 8) in 0..1, labels (N,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return images[train], labels[train], images[test], labels[test]


def batches_per_epoch(samples: int) -> int:
    return samples // GLOBAL_BATCH


def samples_for(samples: int, epoch: int, batch: int, rank: int, world_size: int) -> Tensor:
    """Return one rank's training samples in one step: its share of the next GLOBAL_BATCH in the epoch's permutation."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1000 + epoch))
    global_batch = order[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH]
    return global_batch[rank * GLOBAL_BATCH // world_size : (rank + 1) * GLOBAL_BATCH // world_size]


def loss_of(logits: Tensor, labels: Tensor, world_size: int) -> Tensor:
    """Return the loss, scaled so that its mean over ranks is the global batch's mean, also for unequal shares."""
    return F.cross_entropy(logits, labels, reduction="sum") * (world_size / GLOBAL_BATCH)


def accuracy(model: Net, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def digest(model: nn.Module) -> str:
    """Return the sha256 of the weights' bytes, in the order of state_dict."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()

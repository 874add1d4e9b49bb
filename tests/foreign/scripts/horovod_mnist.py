"""Horovod's elastic MNIST: a DistributedSampler, and an inner loop that numbers what is left of the epoch from 0."""
# ruff: noqa: B020  `for state.epoch in range(state.epoch, ...)` is how a loop goes on from the state

import torch
import torch.utils.data.distributed
from torch import nn
from torch.nn import functional
from torchvision import datasets, transforms

import spotfleet.train as hvd

EPOCHS, BATCH = 6, 16

hvd.init()
torch.manual_seed(42)

dataset = datasets.MNIST("data", transform=transforms.Compose([transforms.ToTensor(),
                                                               transforms.Normalize((0.1307,), (0.3081,))]))
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)

model = nn.Sequential(nn.Conv2d(1, 4, 5, stride=3), nn.ReLU(), nn.Dropout2d(), nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, EPOCHS + 1):
        model.train()
        sampler.set_epoch(state.epoch)
        remaining = len(loader) - state.batch
        for state.batch, (data, target) in enumerate(loader):
            if state.batch >= remaining:
                break
            optimizer.zero_grad()
            functional.cross_entropy(model(data), target).backward()
            optimizer.step()
            state.commit()
        state.batch = 0


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

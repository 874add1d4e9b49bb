"""Horovod's elastic benchmark: steps inside timeit, which no value of the state counts."""

import timeit

import torch
from torch.nn import functional
from torchvision import models

import spotfleet.train as hvd

WARM_UP, BATCHES, ITERATIONS = 10, 10, 3

hvd.init()
torch.manual_seed(0)
model = models.resnet18()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()),
                                     named_parameters=model.named_parameters())
data, target = torch.randn(4, 3, 32, 32), torch.randint(1000, (4,))


def benchmark_step(state):
    optimizer.zero_grad()
    functional.cross_entropy(model(data), target).backward()
    optimizer.step()
    state.batch += 1
    if state.batch == 1:
        state.batch = 0
        state.commit()


@hvd.elastic.run
def run_benchmark(state):
    if not state.warm:
        timeit.timeit(lambda: benchmark_step(state), number=WARM_UP)
        state.warm = True
        state.commit()
    for x in range(state.iter, ITERATIONS):
        state.rates.append(1 / timeit.timeit(lambda: benchmark_step(state), number=BATCHES))
        state.iter = x
        state.commit()


run_benchmark(hvd.elastic.TorchState(model, optimizer, rates=[], iter=0, batch=0, warm=False))

"""PyTorch's ImageNet example: epochs of train and validate, StepLR, the best accuracy, checkpoints by rank 0."""
# ruff: noqa: B020  `for state.epoch in range(state.epoch, ...)` is how a loop goes on from the state

import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models

import spotfleet.train as hvd

EPOCHS, BATCH = 4, 8


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


def main():
    hvd.init()
    torch.manual_seed(1)
    model = models.resnet18()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)

    train_dataset = datasets.FakeData(96, (3, 16, 16), 1000)
    val_dataset = datasets.FakeData(24, (3, 16, 16), 1000)
    train_sampler = hvd.elastic.ElasticSampler(train_dataset, batch_size=BATCH)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=BATCH, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=BATCH, sampler=val_sampler)

    @hvd.elastic.run
    def run(state):
        for state.epoch in range(state.epoch, EPOCHS):
            train_sampler.set_epoch(state.epoch)
            train(train_loader, model, criterion, optimizer)
            acc1 = validate(val_loader, model)
            scheduler.step()
            is_best = acc1 > state.best_acc1
            state.best_acc1 = max(acc1, state.best_acc1)
            if hvd.rank() == 0:
                save_checkpoint({"epoch": state.epoch + 1, "state_dict": model.state_dict(),
                                 "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, is_best)

    run(hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=train_sampler, epoch=0, best_acc1=0))


def train(loader, model, criterion, optimizer):
    losses = AverageMeter()
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loader.sampler.record_batch()


def validate(loader, model):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            top1.update((model(images).argmax(1) == target).float().mean().item(), images.size(0))
    top1.all_reduce()
    return top1.sum / top1.count


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


if __name__ == "__main__":
    main()

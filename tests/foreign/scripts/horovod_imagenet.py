"""Horovod's elastic ImageNet: ElasticSampler, warm-up by len(loader), averaged metrics, checkpoints of its own."""

import os

import torch
from torch.nn import functional
from torchvision import datasets, models, transforms

import spotfleet.train as hvd

EPOCHS, BATCH, WARM_UP, BASE_LR = 4, 4, 5, 0.0125
CHECKPOINT = "checkpoint-{epoch}.pt"


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.n += 1


def adjust_learning_rate(epoch, batch):
    epoch += float(batch + 1) / len(train_loader)
    for group in optimizer.param_groups:
        group["lr"] = BASE_LR * hvd.size() * (epoch * (hvd.size() - 1) / WARM_UP + 1) / hvd.size()


def train(state):
    model.train()
    loss_metric, offset = Metric("train_loss"), state.batch
    for index, (data, target) in enumerate(train_loader):
        state.batch = offset + index
        if state.batch % 3 == 0:
            state.commit()
        elif state.batch % 2 == 0:
            state.check_host_updates()
        adjust_learning_rate(state.epoch, state.batch)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss_metric.update(loss)
        loss.backward()
        state.train_sampler.record_batch(index, BATCH)
        optimizer.step()
    state.commit()


def validate():
    model.eval()
    metric = Metric("val_loss")
    with torch.no_grad():
        for data, target in val_loader:
            metric.update(functional.cross_entropy(model(data), target))


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, CHECKPOINT.format(epoch=epoch))


@hvd.elastic.run
def full_train(state):
    while state.epoch < EPOCHS:
        train(state)
        validate()
        save_checkpoint(state.epoch + 1)
        state.epoch += 1
        state.batch = 0
        state.train_sampler.set_epoch(state.epoch)
        state.commit()


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(42)
    train_dataset = datasets.ImageFolder("images/train", transforms.Compose([
        transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]))
    train_sampler = hvd.elastic.ElasticSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=BATCH, sampler=train_sampler)
    val_dataset = datasets.ImageFolder("images/val", transforms.Compose([transforms.CenterCrop(16),
                                                                         transforms.ToTensor()]))
    val_sampler = hvd.elastic.ElasticSampler(val_dataset)
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=BATCH, sampler=val_sampler)

    model = models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9, weight_decay=0.00005)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average,
                                         gradient_predivide_factor=1.0)
    resumed = 0
    if hvd.rank() == 0:
        for epoch in range(EPOCHS, 0, -1):
            if os.path.exists(CHECKPOINT.format(epoch=epoch)):
                resumed = epoch
                break
    full_train(hvd.elastic.TorchState(model=model, optimizer=optimizer, train_sampler=train_sampler,
                                      val_sampler=val_sampler, epoch=resumed, batch=0))

"""PyTorch's MNIST example: train and test by epochs, dropout, Adadelta, StepLR."""
# ruff: noqa: B020  `for state.epoch in range(state.epoch, ...)` is how a loop goes on from the state

import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms

import spotfleet.train as hvd

EPOCHS, BATCH = 4, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 5, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(256, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.dropout1(functional.relu(self.conv(x)))
        x = self.dropout2(functional.relu(self.fc1(torch.flatten(x, 1))))
        return functional.log_softmax(self.fc2(x), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for number, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        loader.sampler.record_batch()
        print(f"epoch {epoch}: {100.0 * number / len(loader):.0f} % {loss.item():.6f}")


def test(model, loader):
    model.eval()
    with torch.no_grad():
        correct = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
    print(f"{correct} of {len(loader.dataset)}")


def main():
    hvd.init()
    torch.manual_seed(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset1 = datasets.MNIST("data", train=True, transform=transform)
    dataset2 = datasets.MNIST("data", train=False, transform=transform)
    sampler = hvd.elastic.ElasticSampler(dataset1, batch_size=BATCH)
    train_loader = torch.utils.data.DataLoader(dataset1, batch_size=BATCH, sampler=sampler)
    test_loader = torch.utils.data.DataLoader(dataset2, batch_size=100)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

    @hvd.elastic.run
    def run(state):
        for state.epoch in range(state.epoch, EPOCHS + 1):
            sampler.set_epoch(state.epoch)
            train(model, train_loader, optimizer, state.epoch)
            test(model, test_loader)
            scheduler.step()

    run(hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=1))


if __name__ == "__main__":
    main()

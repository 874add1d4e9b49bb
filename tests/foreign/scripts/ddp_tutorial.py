"""The Trainer class of PyTorch's tutorial on DistributedDataParallel, with snapshots that it resumes from."""
# ruff: noqa: B020  `for state.epoch in range(state.epoch, ...)` is how a loop goes on from the state

import os

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import spotfleet.train as hvd


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.model, self.train_data, self.sampler = model, train_data, train_data.sampler
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        self.save_every, self.epochs_run, self.snapshot_path = save_every, 0, snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(source), targets).backward()
        self.optimizer.step()
        self.sampler.record_batch()

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        b_sz = len(next(iter(self.train_data))[0])
        print(f"epoch {epoch}, batch size {b_sz}, {len(self.train_data)} steps")
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch):
        torch.save({"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch}, self.snapshot_path)

    def train(self, max_epochs):
        @hvd.elastic.run
        def run(state):
            for state.epoch in range(state.epoch, max_epochs):
                self._run_epoch(state.epoch)
                if hvd.rank() == 0 and state.epoch % self.save_every == 0:
                    self._save_snapshot(state.epoch)

        run(hvd.elastic.TorchState(self.model, self.optimizer, sampler=self.sampler, epoch=self.epochs_run))


def main(save_every, total_epochs, batch_size, snapshot_path="snapshot.pt"):
    hvd.init()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(96, 20), torch.rand(96, 3))
    model = torch.nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train_data = DataLoader(dataset, batch_size=batch_size, shuffle=False,
                            sampler=hvd.elastic.ElasticSampler(dataset, batch_size))
    Trainer(model, train_data, optimizer, save_every, snapshot_path).train(total_epochs)


if __name__ == "__main__":
    main(save_every=1, total_epochs=4, batch_size=8)

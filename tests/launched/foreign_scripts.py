"""Well-known scripts for torchrun and Horovod, the edits by which each runs without a GPU, and how to start it.

The edits are for the device only, with one line that prints "weights RESTARTS STEP SUM" with the sum of all weights.
Files that a script reads are those of tests/support/foreign.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.foreign.files import Edit

SHOW = ("print('weights', os.environ['RESTART_COUNT'], {step}, "
        "sum(p.double().sum().item() for p in {model}.parameters()), flush=True)\n")


@dataclass(frozen=True)
class LaunchedScript:
    """A script that is started anew at each change."""

    script: str  # in the folder of files
    edits: tuple[Edit, ...]
    args: tuple[str, ...]
    checkpoint_dir: str
    resume_args: str = ""
    every: int = 1  # steps from one checkpoint to the next
    beside: tuple[str, ...] = ()


LAUNCHED = {
    "nanoGPT": LaunchedScript(
        "nanogpt/train.py", (
            Edit("    device = f'cuda:{ddp_local_rank}'\n", ""),
            Edit("    torch.cuda.set_device(device)\n", ""),
            Edit("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
            Edit("data_dir = os.path.join('data', dataset)", "data_dir = dataset"),
            Edit("    iter_num += 1\n", "    iter_num += 1\n    if iter_num % 5 == 0: "
                 + SHOW.format(step="iter_num", model="raw_model"))),
        ("--dataset=text", "--device=cpu", "--dtype=float32", "--compile=False", "--backend=gloo",
         "--gradient_accumulation_steps=2", "--batch_size=2", "--block_size=8", "--n_layer=1", "--n_head=2",
         "--n_embd=8", "--eval_interval=20", "--eval_iters=2", "--always_save_checkpoint=True"),
        "out", "--init_from=resume", 20, ("model.py", "configurator.py")),
    "imagenet": LaunchedScript(
        "pytorch-examples/imagenet/main.py", (
            Edit("        print('using CPU, this will be slow')\n",
                 "        model = (torch.nn.parallel.DistributedDataParallel if args.distributed else "
                 "torch.nn.DataParallel)(model)\n"),
            Edit("FakeData(1281167, (3, 224, 224)", "FakeData(96, (3, 16, 16)"),
            Edit("FakeData(50000, (3, 224, 224)", "FakeData(25, (3, 16, 16)"),
            Edit("        scheduler.step()\n", "        scheduler.step()\n        "
                 + SHOW.format(step="epoch", model="model"))),
        ("--dummy", "-a", "resnet18", "--dist-url", "env://", "--dist-backend", "gloo", "--epochs", "100000", "-b", "8",
         "-j", "0"),
        "*.pth.tar", "--resume checkpoint.pth.tar"),
    "multigpu_torchrun": LaunchedScript(
        "pytorch-examples/distributed/ddp-tutorial-series/multigpu_torchrun.py", (
            Edit("    torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))\n",
                 "    torch.nn.Module.to = torch.Tensor.to = lambda self, *args: self\n"),
            Edit('backend="nccl"', 'backend="gloo"'),
            Edit("DDP(self.model, device_ids=[self.gpu_id])", "DDP(self.model)"),
            Edit('f"cuda:{self.gpu_id}"', '"cpu"'),
            Edit("            self._run_epoch(epoch)\n", "            self._run_epoch(epoch)\n            "
                 + SHOW.format(step="epoch", model="self.model"))),
        ("100000", "1"), "snapshot*.pt", beside=("datautils.py",)),
    "horovod's imagenet without elastic.run": LaunchedScript(
        "horovod/examples/pytorch/pytorch_imagenet_resnet50.py", (
            Edit("import horovod.torch as hvd\n", "import spotfleet.train as hvd\n"),
            Edit("from torch.utils.tensorboard import SummaryWriter\n",
                 "from unittest.mock import MagicMock as SummaryWriter\n"),
            Edit("        save_checkpoint(epoch)\n", "        save_checkpoint(epoch)\n        "
                 + SHOW.format(step="epoch", model="model"))),
        ("--no-cuda", "--train-dir", "images/train", "--val-dir", "images/val", "--epochs", "100000", "--batch-size",
         "4"),
        "*.pth.tar"),
}

"""The well-known files and the edits that make them small, for a CPU, and train with spotfleet.

A file's first edits are those for the surroundings, the others those that docs/scripts.md gives.
"""

from __future__ import annotations

from tests.foreign.standins import BEGINS_AGAIN, REFUSED, UNPROVEN, ForeignScript
from tests.support.foreign.files import Edit, LoopEdit

HOROVOD = "horovod/examples/elastic/pytorch/pytorch_"
ONE_IMPORT = Edit("import horovod.torch as hvd\n", "import spotfleet.train as hvd\n")
MNIST_ARGS = ("--epochs", "6", "--data-dir", "data", "--batch-size")
BENCHMARK_ARGS = ("--model", "resnet18", "--batch-size", "2", "--num-iters", "2")
GPT_ARGS = (
    "--dataset=text", "--device=cpu", "--dtype=float16", "--compile=False", "--gradient_accumulation_steps=6",
    "--batch_size=2", "--block_size=8", "--n_layer=1", "--n_head=2", "--n_embd=8", "--dropout=0.1", "--eval_interval=2",
    "--eval_iters=2", "--learning_rate=0.01", "--warmup_iters=4", "--lr_decay_iters=20")

NO_TENSORBOARD = Edit("from torch.utils.tensorboard import SummaryWriter\n",
                      "from unittest.mock import MagicMock as SummaryWriter\n")
SEED = Edit("hvd.init()\n", "hvd.init()\nimport torch\ntorch.manual_seed(0)\n")

HOROVOD_SAMPLER = (
    Edit("torch.utils.data.distributed.DistributedSampler(\n    train_dataset, num_replicas=hvd.size(), "
         "rank=hvd.rank())", "hvd.elastic.ElasticSampler(train_dataset, args.batch_size)"),
    Edit("        steps_remaining = len(train_loader) - state.batch\n", ""),
    Edit("            if state.batch >= steps_remaining:\n                break\n", ""),
    Edit("for state.batch, (data, target) in", "for batch, (data, target) in"),
    Edit("if state.batch %", "if batch %"),
    Edit("state.epoch, state.batch * len(data)", "state.epoch, batch * len(data)"),
    Edit("100.0 * state.batch /", "100.0 * batch /"),
    Edit("            state.optimizer.step()\n", "            state.optimizer.step()\n            "
                                                "train_sampler.record_batch()\n"),
    Edit("        state.batch = 0\n", ""),
    Edit("epoch=1, batch=0)", "epoch=1, sampler=train_sampler)"))

GPT_CPU = (Edit("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
           Edit("torch.cuda.amp.GradScaler(", "torch.amp.GradScaler('cpu', "),
           Edit("data_dir = os.path.join('data', dataset)", "data_dir = dataset"))
GPT_EDITS = (
    Edit("from torch.nn.parallel import DistributedDataParallel as DDP\n", ""),
    Edit("from torch.distributed import init_process_group, destroy_process_group\n",
         "import spotfleet.train as hvd\n"),
    Edit("ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?\n", "hvd.init()\nddp = True\n"),
    Edit("    init_process_group(backend=backend)\n", ""),
    Edit("int(os.environ['RANK'])", "hvd.rank()"),
    Edit("int(os.environ['LOCAL_RANK'])", "hvd.local_rank()"),
    Edit("int(os.environ['WORLD_SIZE'])", "hvd.size()"),
    Edit("if ddp:\n    model = DDP(model, device_ids=[ddp_local_rank])\n",
         "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"),
    Edit("    X, Y = get_batch('train') # fetch the very first batch\n", ""),
    Edit("            X, Y = get_batch('train')\n", ""),
    Edit("            if ddp:\n                # in DDP", "            if False:\n                # in DDP"),
    Edit("            with ctx:\n                logits, loss = model(X, Y)\n                loss =",
         "            X, Y = get_batch('train')\n            with ctx:\n                logits, loss = model(X, Y)\n"
         "                loss ="),
    Edit("model.module if ddp else model", "model"),
    Edit("        out[split] = losses.mean()\n", "        out[split] = hvd.allreduce(losses.mean()).item()\n"),
    Edit("% eval_interval == 0 and master_process:", "% eval_interval == 0:"),
    Edit("if state.iter_num > 0:\n", "if state.iter_num > 0 and hvd.rank() == 0:\n"),
    Edit("if ddp:\n    destroy_process_group()\n", ""))
GPT_LOOP = LoopEdit("# training loop\n", "if ddp:\n    destroy_process_group()\n", ("iter_num", "best_val_loss"),
                    "model, optimizer, scaler=scaler, iter_num=iter_num, best_val_loss=best_val_loss")

MNIST_DATA = (Edit("'../data'", "'data'", 2),)
MNIST_EDITS = (
    Edit("import torch.optim as optim\n", "import torch.optim as optim\nimport spotfleet.train as hvd\n"),
    Edit("    torch.manual_seed(args.seed)\n", "    hvd.init()\n    torch.manual_seed(args.seed)\n"),
    Edit("                       'pin_memory': True,\n                       'shuffle': True}",
         "                       'pin_memory': True}"),
    Edit("DataLoader(dataset1,**train_kwargs)",
         "DataLoader(\n        dataset1, sampler=hvd.elastic.ElasticSampler(dataset1, args.batch_size), "
         "**train_kwargs)"),
    Edit("lr=args.lr)\n", "lr=args.lr)\n    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters="
                          "model.named_parameters())\n"),
    Edit("range(1, args.epochs + 1):\n", "range(state.epoch, args.epochs + 1):\n            "
                                        "train_loader.sampler.set_epoch(state.epoch)\n"),
    Edit("        optimizer.step()\n", "        optimizer.step()\n        train_loader.sampler.record_batch()\n"))
MNIST_LOOP = LoopEdit("    for epoch in range(1, args", "    if args.save_model:\n", ("epoch",),
                      "model, optimizer, scheduler=scheduler, sampler=train_loader.sampler, epoch=1")

IMAGENET_SMALL = (Edit("FakeData(1281167, (3, 224, 224)", "FakeData(96, (3, 16, 16)"),
                  Edit("FakeData(50000, (3, 224, 224)", "FakeData(25, (3, 16, 16)"))
IMAGENET_EDITS = (
    Edit("import torch.distributed as dist\n", "import torch.distributed as dist\nimport spotfleet.train as hvd\n"),
    Edit("    args.distributed = args.world_size > 1 or args.multiprocessing_distributed\n",
         "    hvd.init()\n    args.world_size, args.distributed = hvd.size(), True\n"),
    Edit('        if args.dist_url == "env://" and args.rank == -1:\n            args.rank = int(os.environ["RANK"])\n',
         ""),
    Edit("        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url,\n"
         "                                world_size=args.world_size, rank=args.rank)\n", ""),
    Edit('    """Sets the learning', "    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters="
                                 'model.named_parameters())\n    """Sets the learning'),
    Edit("torch.utils.data.distributed.DistributedSampler(train_dataset)",
         "hvd.elastic.ElasticSampler(train_dataset, args.batch_size)"),
    Edit("range(args.start_epoch, args.epochs)", "range(state.epoch, args.epochs)"),
    Edit("        if not args.multiprocessing_distributed or (args.multiprocessing_distributed\n"
         "                    and args.rank % ngpus_per_node == 0):\n", "        if hvd.rank() == 0:\n"),
    Edit("        optimizer.step()\n", "        optimizer.step()\n        train_loader.sampler.record_batch()\n"))
IMAGENET_LOOP = LoopEdit("    for epoch in range(args.start_epoch, args", "def train(train_loader",
                         ("epoch", "best_acc1"), "model, optimizer, scheduler=scheduler, sampler=train_sampler,\n"
                         "                               epoch=args.start_epoch, best_acc1=best_acc1")

DDP_SMALL = (Edit("torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))", "torch.manual_seed(0)"),
             Edit("model.to(self.gpu_id)", "model"), Edit('f"cuda:{self.gpu_id}"', '"cpu"'),
             Edit("source.to(self.gpu_id)", "source"), Edit("targets.to(self.gpu_id)", "targets"),
             Edit("MyTrainDataset(2048)", "MyTrainDataset(96)"))
DDP_EDITS = (
    Edit("from torch.utils.data.distributed import DistributedSampler\n", "import spotfleet.train as hvd\n"),
    Edit("from torch.nn.parallel import DistributedDataParallel as DDP\n", ""),
    Edit("from torch.distributed import init_process_group, destroy_process_group\n", ""),
    Edit('    init_process_group(backend="nccl")\n', "    hvd.init()\n"),
    Edit('int(os.environ["LOCAL_RANK"])', "hvd.local_rank()"),
    Edit("        self.model = DDP(self.model, device_ids=[self.gpu_id])\n",
         "        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"),
    Edit("self.model.module.", "self.model."),
    Edit("        self.optimizer.step()\n", "        self.optimizer.step()\n        "
                                           "self.train_data.sampler.record_batch()\n"),
    Edit("        self.train_data.sampler.set_epoch(epoch)\n", ""),
    Edit("        b_sz =", "        self.train_data.sampler.set_epoch(epoch)\n        b_sz ="),
    Edit("range(self.epochs_run,", "range(state.epoch,"),
    Edit("if self.gpu_id == 0 and", "if hvd.rank() == 0 and"),
    Edit("DistributedSampler(dataset)", "hvd.elastic.ElasticSampler(dataset, batch_size)"),
    Edit("    destroy_process_group()\n", ""))
DDP_LOOP = LoopEdit("        for epoch in range(self.epochs_run", "def load_train_objs():\n", ("epoch",),
                    "self.model, self.optimizer, sampler=self.train_data.sampler, epoch=self.epochs_run")

IN_AN_EPOCH = ("in mid-epoch `for state.batch, (data, target) in enumerate(train_loader)` begins at the epoch's first "
               "batch again; use `ElasticSampler`, without `state.batch`")

FILES = {
    "horovod's mnist": ForeignScript(
        HOROVOD + "mnist_elastic.py", REFUSED, BEGINS_AGAIN, "for state.batch, (data, target) in", (ONE_IMPORT,),
        args=(*MNIST_ARGS, "16"), note=IN_AN_EPOCH),
    "horovod's mnist, first epoch": ForeignScript(
        HOROVOD + "mnist_elastic.py", REFUSED, BEGINS_AGAIN, "for state.batch, (data, target) in", (ONE_IMPORT,),
        args=(*MNIST_ARGS, "8")),
    "horovod's mnist with an ElasticSampler": ForeignScript(
        HOROVOD + "mnist_elastic.py", edits=(ONE_IMPORT, *HOROVOD_SAMPLER), args=(*MNIST_ARGS, "8"),
        note="with `ElasticSampler`"),
    "horovod's benchmark": ForeignScript(
        HOROVOD + "synthetic_benchmark_elastic.py", UNPROVEN, "made from unseeded random numbers",
        "data = torch.randn(", (ONE_IMPORT,), args=BENCHMARK_ARGS,
        note="`data = torch.randn(...)` is unseeded; call `torch.manual_seed(0)`"),
    "horovod's benchmark, seeded": ForeignScript(
        HOROVOD + "synthetic_benchmark_elastic.py", REFUSED, "is as at the start", "state.iter = x", (ONE_IMPORT, SEED),
        args=BENCHMARK_ARGS, note="seeded: in its warm-up no value of the state counts the steps; `state.iter = x` "
                                  "comes after them"),
    "horovod's imagenet": ForeignScript(
        HOROVOD + "imagenet_resnet50_elastic.py", edits=(ONE_IMPORT, NO_TENSORBOARD), note="as it is",
        args=("--train-dir", "images/train", "--val-dir", "images/val", "--batch-size", "4", "--epochs", "4")),
    "nanoGPT": ForeignScript(
        "nanogpt/train.py", edits=(*GPT_CPU, *GPT_EDITS), loop=GPT_LOOP, args=GPT_ARGS,
        beside=("model.py", "configurator.py"),
        note="the batch drawn where it is used, the evaluation on all ranks, `no_sync` left out"),
    "mnist": ForeignScript(
        "pytorch-examples/mnist/main.py", edits=(*MNIST_DATA, *MNIST_EDITS), loop=MNIST_LOOP,
        args=("--epochs", "4", "--batch-size", "8"), note="by the table"),
    "imagenet": ForeignScript(
        "pytorch-examples/imagenet/main.py", edits=(*IMAGENET_SMALL, *IMAGENET_EDITS), loop=IMAGENET_LOOP,
        args=("--dummy", "--seed", "1", "-b", "8", "--epochs", "4", "-j", "0"),
        note="by the table; `DistributedSampler` stays for the validation"),
    "ddp tutorial": ForeignScript(
        "pytorch-examples/distributed/ddp-tutorial-series/multigpu_torchrun.py", edits=(*DDP_SMALL, *DDP_EDITS),
        loop=DDP_LOOP, args=("4", "1", "--batch_size", "8"), beside=("datautils.py",),
        note="by the table, and seeded: its data are random; `set_epoch` before it looks at a batch"),
}

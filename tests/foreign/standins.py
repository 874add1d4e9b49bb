"""Table of the stand-ins, each as it is and with one more change, and the verdict on each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.foreign.files import Edit, LoopEdit, edited

EXACT, REFUSED, DIFFERS, UNPROVEN = "exact", "failed", "differs", "not deterministic"


@dataclass(frozen=True)
class ForeignScript:
    """A script and what verify finds: a `message` of the refusal, or the usual cause, and the `line` that it names."""

    script: str
    verdict: str = EXACT
    message: str = ""
    line: str = ""
    edits: tuple[Edit, ...] = ()
    loop: LoopEdit | None = None
    args: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # files in the script's folder that it needs
    note: str = ""  # for docs/scripts.md

    def text(self, original: str) -> str:
        return edited(self.loop.apply(original) if self.loop else original, self.edits)


BEGINS_AGAIN = r"state.batch = \d+ and has begun again with its first batch"
ELASTIC_SAMPLER = (
    Edit("torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())",
         "hvd.elastic.ElasticSampler(dataset, BATCH)"),
    Edit("        remaining = len(loader) - state.batch\n", ""),
    Edit("        for state.batch, (data, target) in enumerate(loader):\n            if state.batch >= remaining:\n"
         "                break\n", "        for data, target in loader:\n"),
    Edit("            optimizer.step()\n", "            optimizer.step()\n            sampler.record_batch()\n"),
    Edit("        state.batch = 0\n", ""),
    Edit("epoch=1, batch=0)", "epoch=1, sampler=sampler)"))
DRAWN_AHEAD = (
    Edit("    while True:\n", '    X, Y = get_batch("train")\n    while True:\n'),
    Edit('            X, Y = get_batch("train")\n            loss =', "            loss ="),
    Edit("            scaler.scale(", '            X, Y = get_batch("train")\n            scaler.scale('))
BEST_OF_RANK_0 = (
    Edit("if state.iter_num % EVERY == 0:", "if state.iter_num % EVERY == 0 and master_process:"),
    Edit("hvd.allreduce(losses.mean()).item()", "losses.mean()"))
PEEK_FIRST = (
    Edit("        self.sampler.set_epoch(epoch)\n", ""),
    Edit("        for source, targets in self",
         "        self.sampler.set_epoch(epoch)\n        for source, targets in self"))

STANDINS = {
    "horovod's mnist": ForeignScript("horovod_mnist.py", REFUSED, BEGINS_AGAIN, "in enumerate(loader)"),
    "horovod's mnist, first epoch": ForeignScript("horovod_mnist.py", REFUSED, BEGINS_AGAIN, "in enumerate(loader)",
                                                  (Edit("BATCH = 6, 16", "BATCH = 6, 8"),)),
    "horovod's mnist with an ElasticSampler": ForeignScript("horovod_mnist.py", edits=ELASTIC_SAMPLER),
    "horovod's benchmark": ForeignScript("horovod_benchmark.py", REFUSED, "is as at the start", "state.iter = x"),
    "horovod's imagenet": ForeignScript("horovod_imagenet.py"),
    "nanoGPT": ForeignScript("nanogpt.py"),
    "nanoGPT, a batch drawn ahead": ForeignScript("nanogpt.py", DIFFERS, "drawn ahead of its iteration",
                                                  '    X, Y = get_batch("train")', DRAWN_AHEAD),
    "nanoGPT, a best loss on rank 0 alone": ForeignScript(
        "nanogpt.py", REFUSED, "state.best_val_loss is tensor.* on rank 0", "state.best_val_loss = ", BEST_OF_RANK_0),
    "imagenet": ForeignScript("imagenet.py"),
    "mnist": ForeignScript("mnist.py"),
    "ddp tutorial": ForeignScript("ddp_tutorial.py"),
    "ddp tutorial, a look at a batch before set_epoch": ForeignScript(
        "ddp_tutorial.py", REFUSED, "StopIteration", "next(iter(self.train_data))", PEEK_FIRST),
}

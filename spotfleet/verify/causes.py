"""What usually causes a difference, chosen by its symptoms. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spotfleet.verify.compare import RecordPart, RunDifference
from spotfleet.verify.suspects import Suspects


@dataclass(frozen=True)
class UsualCause:
    """A usual cause, with the change that cures it and the lines of the script that it may mean."""

    text: str
    hint: str
    lines: tuple[int, ...] = ()


def causes(difference: RunDifference, suspects: Suspects, provisional: bool) -> list[UsualCause]:
    """Return usual causes, the likeliest first.

    `provisional`: a worker of that run had another rank or size before elastic.run than in it.
    """
    match difference.part:
        case RecordPart.VALUES:
            return [UsualCause(
                f"state.{difference.name} is not what it was when this step's gradient was computed undisturbed",
                "let values in the state name the batch while its gradient is computed (`for state.batch in range("
                "state.batch, n)`), and change all others after optimizer.step()"), *_own_values(suspects, provisional)]
        case RecordPart.BEFORE:
            return [UsualCause("weights are changed outside optimizer.step(), and again when an iteration is repeated",
                          "make the change in optimizer.register_step_post_hook(...)", suspects.weights)]
        case RecordPart.BUFFERS:
            return [UsualCause(f"state.{difference.name} differs by rank and is used in training; a replacement gets "
                               "another rank's", "make it the same on all ranks at each step, for instance with "
                          "hvd.allreduce, or use SyncBatchNorm", suspects.buffers)]
    found = _ahead(suspects)
    if difference.lone_rank is not None and difference.own:
        return _own_values(suspects, provisional)
    if RecordPart.GRADIENT not in difference.parts:
        return [UsualCause(
            "the optimizer keeps something that does not travel: an attribute, or an entry of optimizer.state under a "
            "key that is no parameter", "keep it in optimizer.state[parameter] or in a parameter group")]
    own = _own_values(suspects, provisional)
    found = [*_indices(suspects), *found]
    return [*own, *found] if suspects.outside and not suspects.draws else [*found, *own]


def _ahead(suspects: Suspects) -> list[UsualCause]:
    return [UsualCause(
        "a batch is fetched or drawn ahead of its iteration, or at the top of the function, which is called again "
        "after each change", "fetch and draw inside the iteration that uses it, or draw from a generator in the state",
        suspects.draws)]


def _indices(suspects: Suspects) -> list[UsualCause]:
    return [UsualCause(
        "the number that enumerate() gives a batch begins at 0 again where a loader begins in mid-epoch",
        "count from there: enumerate(loader, sampler.batches_done)", suspects.indices)] if suspects.indices else []


def _own_values(suspects: Suspects, provisional: bool) -> list[UsualCause]:
    outside = UsualCause(
        "a variable outside the state counts or collects something that training uses; a replacement begins with its "
        "first value", "put it into TorchState(...), and use state.NAME", suspects.outside)
    ranks = UsualCause(
        "something is made from hvd.rank() or hvd.size() before elastic.run, where both are provisional on a worker "
        "that joins", "make it inside the function, or in a reset callback", suspects.ranks)
    return [ranks, outside] if suspects.ranks and (provisional or not suspects.outside) else [outside, ranks]


def unseeded(suspects: Suspects) -> list[UsualCause]:
    return [UsualCause("the model or the data are made from unseeded random numbers",
                  "call torch.manual_seed(0) (and random.seed, numpy.random.seed) before the model is built",
                  suspects.unseeded),
            UsualCause("an operation is not deterministic, or something depends on the time",
                  "try torch.use_deterministic_algorithms(True)")]


def apart() -> list[UsualCause]:
    return [UsualCause("ranks hold different weights without any disturbance: parameters are trained that the "
                  "DistributedOptimizer does not have, or code changes them by rank",
                  "give all trained parameters to one DistributedOptimizer, and change them alike on all ranks")]

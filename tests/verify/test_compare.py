"""The first difference between recorded runs, suspect lines of scripts, and the causes that fit. Without workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.verify.causes import causes
from spotfleet.verify.compare import RecordPart, RunDifference, first_difference, ranks_apart, statistics
from spotfleet.verify.scenarios import Disturbance, RecordedRun
from spotfleet.verify.suspects import Suspects, find
from tests.support.verify import verify_scripts as scripts

STEPS, RANKS = 6, 2


def run(**changes: dict[tuple[int, int], dict]) -> RecordedRun:
    """A run of two ranks. `changes`: by part, what differs from `version, rank` on."""
    made = RecordedRun("kill", disturbances=[Disturbance(2, "rank 1 was killed"), Disturbance(4, "rank 0 was killed")])
    made.entered = {"a": {}, "b": {}, "c": {}}
    for version in range(1, STEPS + 1):
        for rank in range(RANKS):
            made.records[version, rank] = {
                "values": {"step": [version, str(version)]}, "before": {"w": version},
                "tensors": {"w": version, "b": 7},
                "buffers": {"running_mean": 10 * version + rank}, "draws": version, "gradient": version + rank,
                "worker": "c" if rank and version > 2 else "ab"[rank]}
    for part, wrong in changes.items():
        for (version, rank), value in wrong.items():
            made.records[version, rank][part] = value
    return made


def test_equal_runs_have_no_difference_and_one_that_ended_early_is_compared_as_far_as_it_came():
    short = run()
    short.records = {k: v for k, v in short.records.items() if k[0] < 4}
    assert first_difference(run(), run()) is first_difference(run(), short) is ranks_apart(run()) is None


def test_the_first_step_counts_with_the_disturbance_before_it():
    found = first_difference(run(), run(tensors={(5, 0): {"w": 0, "b": 7}, (6, 0): {"w": 1, "b": 1}}))
    assert found is not None
    assert (found.version, found.ranks, found.name, found.part) == (5, (0,), "w", RecordPart.TENSORS)
    assert found.after == Disturbance(4, "rank 0 was killed")


@pytest.mark.parametrize(("changes", "part", "name"), [
    ({"values": {(3, 1): {"step": [9, "9"]}}, "tensors": {(3, 1): {"w": 0, "b": 0}}}, RecordPart.VALUES, "step"),
    ({"before": {(3, 1): {"w": 0}}, "tensors": {(3, 1): {"w": 0, "b": 0}}}, RecordPart.BEFORE, "w"),
    ({"buffers": {(3, 1): {"center": 1}}, "gradient": {(3, 1): 9}, "tensors": {(3, 1): {"w": 0, "b": 7}}},
     RecordPart.BUFFERS, "center"),
    ({"buffers": {(3, 1): {"running_mean": 1}}, "gradient": {(3, 1): 9}, "tensors": {(3, 1): {"w": 3, "b": 0}}},
     RecordPart.TENSORS, "b"),
])
def test_what_differs_first_within_a_step_is_named(changes, part, name):
    expected = run(buffers={(3, 1): {"center": 0}}) if part is RecordPart.BUFFERS else run()
    found = first_difference(expected, run(**changes))
    assert found is not None and (found.version, found.part, found.name) == (3, part, name)


def test_a_value_that_was_put_back_after_the_forward_pass_had_used_another_is_named():
    changes = {"tensors": {(3, 0): {"w": 0, "b": 7}}, "reported": {(3, 0): ("step",)}}
    found = first_difference(run(), run(**changes))
    assert found is not None
    assert (found.part, found.name, found.text) == (RecordPart.VALUES, "step", "the forward pass used another value")


def test_a_replacements_own_gradient_is_known_from_the_others():
    tensors = {(3, r): {"w": 0, "b": 7} for r in (0, 1)}
    lone = first_difference(run(), run(gradient={(3, 1): 9}, tensors=tensors))
    both = first_difference(run(), run(gradient={(3, 0): 9, (3, 1): 9}, tensors=tensors))
    assert lone is not None and both is not None
    assert (lone.lone_rank, lone.own, both.lone_rank) == (1, True, None)


def test_statistics_alone_are_no_difference():
    found = run(buffers={(6, 1): {"running_mean": 1}})
    assert first_difference(run(), found) is None and statistics(run(), found) == ["running_mean"]


def test_ranks_of_one_run_that_hold_different_weights_are_found():
    found = ranks_apart(run(tensors={(2, 1): {"w": 2, "b": 8}}))
    assert found is not None and (found.version, found.name) == (2, "b")


WHERE = RunDifference("kill", 3, (0, 1), "w", RecordPart.TENSORS, "", None, frozenset(
    {RecordPart.TENSORS, RecordPart.GRADIENT}))


@pytest.mark.parametrize(("difference", "suspects", "provisional", "first"), [
    (WHERE, Suspects(), False, "a batch is fetched or drawn ahead"),
    (WHERE, Suspects(outside=(3,)), False, "a variable outside the state"),
    (WHERE, Suspects(indices=(3,), draws=(4,)), False, "the number that enumerate() gives a batch"),
    (WHERE, Suspects(outside=(3,), draws=(4,)), False, "a batch is fetched or drawn ahead"),
    (replace(WHERE, lone_rank=1, own=True), Suspects(ranks=(2,)), True, "something is made from hvd.rank()"),
    (replace(WHERE, lone_rank=1, own=True), Suspects(), True, "a variable outside the state"),
    (replace(WHERE, part=RecordPart.BEFORE), Suspects(), False, "weights are changed outside optimizer.step()"),
    (replace(WHERE, part=RecordPart.VALUES), Suspects(), False, "state.w is not what it was"),
    (replace(WHERE, parts=frozenset({RecordPart.TENSORS})), Suspects(), False, "the optimizer keeps something"),
])
def test_causes_follow_the_symptoms(difference, suspects, provisional, first):
    assert causes(difference, suspects, provisional)[0].text.startswith(first)


def test_suspect_lines_are_found_in_the_text():
    def lines(script: str, text: str) -> tuple[int, ...]:
        return tuple(n for n, line in enumerate(script.splitlines(), 1) if text in line)

    assert find(scripts.COUNTER_OUTSIDE).outside == lines(scripts.COUNTER_OUTSIDE, 'seen["n"] += 1')
    assert find(scripts.MADE_FROM_RANK).ranks == lines(scripts.MADE_FROM_RANK, "scale = ")
    assert find(scripts.DRAWN_AHEAD).draws == lines(scripts.DRAWN_AHEAD, "    x = torch.randn")[:1]
    assert find(scripts.WEIGHTS_TOUCHED).weights == lines(scripts.WEIGHTS_TOUCHED, "mul_")
    assert find(scripts.SOUND) == Suspects(runs=True) and not find(scripts.NOT_ELASTIC).runs
    through = scripts.DRAWN_AHEAD.replace("x = torch.randn(4, 3)", "x = batch(0)")
    assert find(through).draws == lines(through, "    x = batch(0)")[:1]
    assert find("x = torch.randn(3)\ny = torch.rand(2)").unseeded == (1, 2)
    assert find("torch.manual_seed(0)\nx = torch.randn(3)").unseeded == ()
    assert find("def broken(:") == Suspects()


@pytest.mark.parametrize(("loop", "body", "found"), [
    ("for b, x in enumerate(loader):", "if b == 3: break", (6,)),
    ("for b, x in enumerate(loader):", "sampler.record_batch(b, 8)", ()),
    ("for b, x in enumerate(loader, sampler.batches_done):", "if b == 3: break", ()),
    ("for b, x in tqdm(enumerate(loader)):", "rate(b / len(loader))", (6,)),
])
def test_a_loader_whose_batches_are_counted_from_0_is_a_suspect(loop, body, found):
    script = f"""
sampler = hvd.elastic.ElasticSampler(data, batch_size=8)

@hvd.elastic.run
def train(state):
    {loop}
        {body}
"""
    assert find(script).indices == found
    assert find(script.replace("ElasticSampler", "DistributedSampler")).indices == ()

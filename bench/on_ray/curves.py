"""Learning curves on which schedulers of trials are compared. Fixed: the generators, their seeds and the recordings.

    python bench/on_ray/curves.py          # what the three sets look like
    python bench/on_ray/curves.py --record # train 200 small networks on scikit-learn's digits, write digits_curves.json

- `fast` and `slow` are drawn: accuracy after e epochs is best * (1 - 0.9 * exp(-(e / tau)^0.7)), a stretched
  exponential; best = 0.55 + 0.42 * Beta(2, 3). `fast` has tau of 3 to 40 epochs of 12 s, `slow` 10 to 80 of 30 s, both
  log-uniform. A reported accuracy has noise with a standard deviation of 0.005.
- `digits` is recorded: validation accuracy after each epoch of 200 trainings of a network with one hidden layer, with
  hyperparameters drawn at random. It has the noise of its own. An epoch counts as 12 s.

Each set has three deadlines and 20 seeds. A seed draws 100 trials.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RECORDED = Path(__file__).parent / "digits_curves.json"
TRIALS = 100
SEEDS = range(20)
EPOCHS = 100  # recorded of each training
NOISE = 0.005


@dataclass(frozen=True)
class Curve:
    """One trial: what it would report after so many epochs, and what a test on fresh data would find."""

    reported: Callable[[int], float]
    accuracy: Callable[[float], float]


@dataclass(frozen=True)
class CurveSet:
    name: str
    epoch_s: float  # with one atom
    max_epochs: int
    deadlines_s: tuple[int, int, int]
    draw: Callable[[int], list[Curve]]  # seed -> trials, in the order in which they may begin


def _drawn(low: float, high: float) -> Callable[[int], list[Curve]]:
    def curve(rng: random.Random) -> Curve:
        best = 0.55 + 0.42 * rng.betavariate(2, 3)
        tau = math.exp(rng.uniform(math.log(low), math.log(high)))
        noise = rng.randrange(2**32)

        def accuracy(epochs: float) -> float:
            return best * (1 - 0.9 * math.exp(-((epochs / tau) ** 0.7)))

        def reported(epochs: int) -> float:
            return accuracy(epochs) + random.Random(noise * 1_000_003 + epochs).gauss(0, NOISE)

        return Curve(reported, accuracy)

    def draw(seed: int) -> list[Curve]:
        rng = random.Random(seed)
        return [curve(rng) for _ in range(TRIALS)]

    return draw


def _recorded(seed: int) -> list[Curve]:
    """Draw recorded trainings. Their accuracy is that of the best epoch so far, as of a kept checkpoint."""

    def curve(values: list[float]) -> Curve:
        best = [max(values[: n + 1]) for n in range(len(values))]

        def accuracy(epochs: float) -> float:
            return best[min(int(epochs), EPOCHS) - 1] if epochs >= 1 else 0.0

        return Curve(lambda epochs: values[min(epochs, EPOCHS) - 1], accuracy)

    curves = json.loads(RECORDED.read_text())["curves"]
    return [curve(values) for values in random.Random(seed).sample(curves, TRIALS)]


SETS = (
    CurveSet("fast", 12.0, 200, (900, 1800, 3600), _drawn(3, 40)),
    CurveSet("slow", 30.0, 200, (1800, 3600, 7200), _drawn(10, 80)),
    CurveSet("digits", 12.0, EPOCHS, (300, 900, 1800), _recorded),
)


def record() -> None:
    """Train and write all recorded curves; the same on every run with the same versions."""
    import numpy as np
    import sklearn
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    inputs, labels = data.data[order] / 16, data.target[order]
    train, valid = slice(0, 1200), slice(1200, None)
    rng = random.Random(0)
    configs, curves = [], []
    for number in range(200):
        config = {
            "hidden_layer_sizes": (rng.choice([4, 8, 16, 32, 64]),),
            "learning_rate_init": 10 ** rng.uniform(-4, 0),
            "momentum": rng.choice([0.0, 0.5, 0.9, 0.95]),
            "batch_size": rng.choice([16, 32, 64, 128, 256]),
            "alpha": 10 ** rng.uniform(-6, -1),
            "activation": rng.choice(["relu", "tanh", "logistic"]),
        }
        model = MLPClassifier(solver="sgd", random_state=number, **config)
        values = []
        for _ in range(EPOCHS):
            with np.errstate(all="ignore"):
                model.partial_fit(inputs[train], labels[train], classes=range(10))
                values.append(round(float(model.score(inputs[valid], labels[valid])), 4))
        configs.append(config)
        curves.append(values)
    about = {"scikit-learn": sklearn.__version__, "rows": {"train": 1200, "valid": len(labels) - 1200}}
    rows = ",\n".join(json.dumps(values, separators=(",", ":")) for values in curves)
    settings = ",\n".join(json.dumps(config) for config in configs)
    RECORDED.write_text(f'{{"about": {json.dumps(about)},\n"curves": [\n{rows}],\n"configs": [\n{settings}]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true", help="train the recorded set again")
    if parser.parse_args().record:
        record()
    for found in SETS:
        ends = sorted(c.accuracy(found.max_epochs) for seed in SEEDS for c in found.draw(seed))
        after = [sum(c.accuracy(n) for c in found.draw(0)) / TRIALS for n in (1, 4, 16, 64)]
        print(f"{found.name}: accuracy at the end {ends[0]:.3f} to {ends[-1]:.3f}, median {ends[len(ends) // 2]:.3f}; "
              f"mean after 1, 4, 16, 64 epochs " + ", ".join(f"{a:.3f}" for a in after))


if __name__ == "__main__":
    main()

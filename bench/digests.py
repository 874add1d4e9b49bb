"""Cost of the digests that compare ranks after a change of membership.

    python bench/digests.py [--mb 120] [--tensors 3 100 450] [--device cuda]

Prints, for each number of tensors, the time of one digest and that of one sum over the same memory, which only reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from spotfleet.train.state import digest


def quickest_ms(work: Callable[[], object], device: str, times: int = 9) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return 1e3 * min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=120)
    parser.add_argument("--tensors", type=int, nargs="+", default=[3, 100, 450])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for count in args.tensors:
        tensors = [torch.randn(args.mb * 250_000 // count, device=args.device) for _ in range(count)]
        took = quickest_ms(lambda tensors=tensors: digest.of_tensors(tensors), args.device)
        read = quickest_ms(lambda tensors=tensors: [t.sum() for t in tensors], args.device)
        print(f"{args.mb} MB in {count} tensors on {args.device}: digest {took:.1f} ms, sum {read:.1f} ms "
              f"({torch.get_num_threads()} threads)")


if __name__ == "__main__":
    main()

"""`python -m tests.interrupts`: interrupts steps of every way at thousands of moments."""

import argparse
import os
import random
import sys
import time
from collections import Counter

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from tests.interrupts.steps import WAYS
from tests.interrupts.trial import Trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interrupts", description=__doc__)
    parser.add_argument("ways", nargs="*", choices=[[], *WAYS], help="all of them, by default")
    parser.add_argument("--count", type=int, default=500, help="moments of each way; 0 is all")
    parser.add_argument("--signals", type=int, default=0, help="real signals to each way, besides")
    parser.add_argument("--seed", type=int, default=0, help="which moments are drawn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, failed = random.Random(options.seed), 0
    for way in options.ways or WAYS:
        began = time.monotonic()
        trial, tried, wrong = Trial(way), 0, Counter[str]()
        for retain in (False, True):
            moments = range(trial.moments(retain))
            half = (options.count + 1) // 2
            chosen = sorted(draw.sample(moments, half)) if 0 < half < len(moments) else moments
            for at in chosen:
                tried += 1
                wrong.update(trial.interrupted(at, retain))
        lasts = trial.seconds()
        for i in range(options.signals):
            tried += 1
            wrong.update(trial.signalled(draw.uniform(0, 1.2 * lasts), retain=bool(i % 2)))
        took = time.monotonic() - began
        print(f"{way}: {tried} interrupts, {sum(wrong.values())} wrong, {took:.0f} s", flush=True)  # noqa: T201
        for what, count in wrong.most_common():
            print(f"  {count}x {what}")  # noqa: T201
        failed += sum(wrong.values())
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

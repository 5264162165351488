"""Timing as ratios: variants interleaved in one run, medians compared, since absolute times mean little here."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping


def medians(variants: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 5) -> dict[str, float]:
    """Median seconds of each variant, run in a new random order every time round."""
    names = list(variants)
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + repeats):
        shuffle(names)
        for name in names:
            start = time.perf_counter()
            variants[name]()
            if number >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}

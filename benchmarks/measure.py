"""Timing as ratios: variants interleaved in one run, since absolute times mean little on a shared machine."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(variants: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 5) -> dict[str, list[float]]:
    """Each variant's times. In every repeat each runs once, in a new random order, so that what the machine does
    meanwhile hits all of them alike."""
    names = list(variants)
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for number in range(warmup + repeats):
        shuffle(names)
        for name in names:
            start = time.perf_counter()
            variants[name]()
            if number >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def ratios(
    baseline: str, variants: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 5
) -> dict[str, float]:
    """Each variant's time over the baseline's: the median over interleaved repeats."""
    times = interleaved(variants, repeats, warmup)
    return {
        name: statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))
        for name in variants
        if name != baseline
    }

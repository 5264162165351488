"""Which steps a lane captures and replays, and which clients it gets, decided without a GPU; what is captured is tested
in test_captured.py."""

from __future__ import annotations

import gc
import random
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedfa.engines.captured import Captured
from fedfa.engines.lane import ALWAYS, MOST_SIZES, OFTEN, STRETCH, Lane, assigned, captured


def lane(*captured: tuple[int, int]) -> Any:
    """A lane with some graphs, that notes what it does."""
    made = object.__new__(Lane)
    made.done = []
    made._seen = Counter()
    made._graphs = {
        pair: SimpleNamespace(replay=lambda pair=pair: made.done.append(pair))  # type: ignore[misc]  # its default
        for pair in captured
    }
    made._step = lambda client, algorithm, size: made.done.append((size, 0))
    return made


def test_a_size_is_captured_when_it_has_come_often() -> None:
    own = lane()
    for _ in range(OFTEN - 1):
        assert own.missing([7]) == []
    assert own.missing([7]) == [(7, 1)]


def test_a_stretch_is_captured_where_there_is_one() -> None:
    assert lane().missing([10] * STRETCH + [3]) == [(10, 1), (10, STRETCH)]
    assert lane().missing(([10] * (STRETCH - 1) + [3]) * 2) == [(10, 1)]  # often, but not in a row
    assert lane((10, 1)).missing([10] * STRETCH) == [(10, STRETCH)]  # another client's batches were fewer
    assert lane((10, 1), (10, STRETCH)).missing([10] * 50) == []


def test_no_more_sizes_than_there_is_room_for() -> None:
    sizes = [size for size in range(1, MOST_SIZES + 4) for _ in range(OFTEN)]
    known = {size for size, _ in lane().missing(sizes)}
    assert len(known) == MOST_SIZES
    full = lane(*((size, 1) for size in range(100, 100 + MOST_SIZES)))
    assert full.missing([5] * OFTEN) == []


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_a_capture(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is freed by the thread that captures another one ends the capture."""
    monkeypatch.setattr("fedfa.engines.lane._give_up", lambda *_: None)  # which speaks to torch's allocator
    seen = []
    graph: Any = SimpleNamespace(capture_begin=lambda *_, **__: seen.append(gc.isenabled()), capture_end=lambda: None)
    gc.enable()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), captured(graph, pool=(0, 1)):
        seen.append(gc.isenabled())
        assert not fails or 1 // 0
    assert seen == [False, False] and gc.isenabled()


@pytest.mark.parametrize(
    ("captured", "wanted"),
    [
        ([(10, 1), (10, STRETCH)], [(10, STRETCH)] * 2 + [(10, 1)] + [(3, 0)]),
        ([(10, 1)], [(10, 1)] * (2 * STRETCH + 1) + [(3, 0)]),
        ([(3, 1)], [(10, 0)] * (2 * STRETCH + 1) + [(3, 1)]),
    ],
)
def test_every_step_is_taken_once_and_in_order(captured: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    own, client = lane(*captured), SimpleNamespace(steps=0)
    own.play(client, None, [10] * (2 * STRETCH + 1) + [3])
    assert own.done == wanted
    assert client.steps == 2 * STRETCH + 2


def test_the_freest_lanes_come_first() -> None:
    """Eight clients in three lanes, the largest first, the lane that has got least taking the next: where the wave is
    not full, too."""
    engine = object.__new__(Captured)
    engine._lanes, engine._most = [lane() for _ in range(3)], 3
    given: Counter[Lane] = Counter()
    sizes = [90, 80, 50, 45, 40, 30, 20, 10]
    while sizes:
        for own in engine._freest(len(sizes), given):
            given[own] += sizes.pop(0)
    assert sorted(given.values()) == [115, 120, 130]
    assert [given[own] for own in engine._lanes] == [90 + 30 + 10, 80 + 40, 50 + 45 + 20]


@pytest.mark.parametrize(
    ("failures", "given", "tries", "sent"),
    [(0, True, 1, "sent"), (1, True, 2, "sent"), (1, False, 1, None), (2, True, 2, None)],
)
def test_without_room_a_client_is_started_again_if_memory_was_given_back(
    failures: int, given: bool, tries: int, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    engine: Any = object.__new__(Captured)
    begun, fewer, client = [], [], SimpleNamespace(memory={"kept": 1})

    def played(client: Any, *_: Any) -> tuple[str, bool]:
        begun.append(client.memory)
        client.memory = {"kept": 2}  # as steps leave it
        if len(begun) <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "sent", False

    engine._played, engine._gave_back, engine._fewer = played, lambda: given, fewer.append
    own = SimpleNamespace(stream=SimpleNamespace(wait_stream=lambda _: None), works=True)
    engine._lanes = [own, SimpleNamespace(works=True), SimpleNamespace(works=False)]
    assert engine._start(client, own, None, [10]) == sent
    assert begun == [{"kept": 1}] * tries
    assert fewer == ([] if sent else [1])


def sizes(*found: int) -> frozenset[int]:
    return frozenset(found)


def test_where_sizes_are_alike_lanes_come_in_their_order() -> None:
    assert assigned([sizes(10)] * 3, [{}, {10: ALWAYS, 3: 4}, {10: 2}]) == [0, 1, 2]
    assert assigned([], []) == []


def test_a_client_goes_where_its_sizes_are_captured() -> None:
    lanes = [{10: ALWAYS, 3: ALWAYS}, {10: ALWAYS, 7: ALWAYS}, {10: ALWAYS}]
    assert assigned([sizes(10, 7), sizes(10), sizes(10, 3)], lanes) == [1, 2, 0]


def test_a_client_that_suits_everywhere_leaves_the_lane_to_one_that_does_not() -> None:
    lanes = [{10: ALWAYS, 3: ALWAYS, 5: ALWAYS}, {10: ALWAYS, 4: ALWAYS}]
    assert assigned([sizes(10), sizes(10, 3)], lanes) == [1, 0]


def test_before_anything_is_captured_sizes_meet_where_they_were() -> None:
    lanes = [{10: 30, 3: 1}, {10: 30, 7: 2}, {10: 30, 3: 2}]
    assert assigned([sizes(10, 3), sizes(10, 7), sizes(10, 5)], lanes) == [2, 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_everyone_gets_a_lane_of_its_own(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    clients = [sizes(10, *draw.sample(range(2, 10), draw.randint(0, 1))) for _ in range(count)]
    lanes = [Counter({size: draw.choice([0, 1, 3, ALWAYS]) for size in range(2, 11)}) for _ in range(count)]
    assert sorted(assigned(clients, lanes)) == list(range(count))


def test_a_federation_with_many_last_batches_captures_fewer() -> None:
    """Ten of a hundred clients a round, with last batches of 0 to 9 in batches of ten, for a hundred rounds: a lane
    captures a size when it has met it four times."""

    def captures(matched: bool) -> int:
        draw, lanes = random.Random(0), [Counter[int]() for _ in range(10)]
        last = [draw.randint(0, 9) for _ in range(100)]
        for _ in range(100):
            clients = [sizes(10, *([last[i]] if last[i] > 1 else [])) for i in draw.sample(range(100), 10)]
            known = [{size: n if n < OFTEN else ALWAYS for size, n in lane.items()} for lane in lanes]
            for client, lane in zip(clients, assigned(clients, known) if matched else range(10), strict=True):
                lanes[lane].update(client)
        return sum(n >= OFTEN for lane in lanes for n in lane.values())

    assert captures(matched=True) < 0.7 * captures(matched=False)

"""Random streams: named, stable, and independent of each other."""

from __future__ import annotations

import hashlib
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfa.nets import ResNet18
from fedfa.streams import DrawnFrom, Streams, derive, generator

paths = st.lists(st.one_of(st.integers(0, 2**40), st.text(max_size=8)), min_size=1, max_size=4)


def draw(streams: Streams, name: str, count: int = 4) -> list[float]:
    return torch.rand(count, generator=streams(name)).tolist()


def test_seeds_are_what_they_were_when_results_were_recorded() -> None:
    assert derive(0, 1, "scanner", "order") == 7213448420656748780
    assert derive(0, "initialisation") == 4806773427270544447


def test_a_seed_is_the_first_63_bits_of_a_hash_of_the_path() -> None:
    digest = hashlib.blake2b(b'[0, 1, "scanner", "order"]', digest_size=8).hexdigest()
    assert derive(0, 1, "scanner", "order") == int(digest, 16) >> 1


@given(paths)
def test_any_path_gives_a_seed_that_torch_takes(path: list[int | str]) -> None:
    seed = derive(*path)
    assert 0 <= seed < 2**63
    assert generator(*path).initial_seed() == seed


def test_initial_weights_are_the_seeds_whatever_other_threads_draw() -> None:
    """Runs may be threads of one process, whose generator they all set anew."""
    torch.manual_seed(7)
    wanted = ResNet18(num_classes=3).state_dict()
    ended = threading.Event()

    def disturb() -> None:
        while not ended.is_set():
            torch.manual_seed(1)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with DrawnFrom(torch.Generator().manual_seed(7)):
            found = ResNet18(num_classes=3).state_dict()
    finally:
        ended.set()
        thread.join()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@given(paths, paths)
def test_different_paths_give_different_seeds(one: list[int | str], other: list[int | str]) -> None:
    assert (derive(*one) == derive(*other)) == (one == other)


def test_a_number_is_not_its_text_and_a_path_is_not_its_parts_joined() -> None:
    assert derive(1, "a") != derive("1", "a")
    assert derive("ab", "c") != derive("a", "bc")


def test_streams_differ_by_seed_round_client_and_name() -> None:
    changed = [Streams(0, 1, "a"), Streams(1, 1, "a"), Streams(0, 2, "a"), Streams(0, 1, "b")]
    draws = [tuple(draw(streams, "order")) for streams in changed] + [tuple(draw(Streams(0, 1, "a"), "ffa"))]
    assert len(set(draws)) == 5


def test_a_stream_does_not_depend_on_what_else_is_drawn() -> None:
    one, other = Streams(0, 1, "a"), Streams(0, 1, "a")
    first = draw(one, "order")
    draw(other, "ffa", 100)
    draw(other, "mix")
    assert draw(other, "order") == first


def test_a_stream_goes_on_where_it_was() -> None:
    together, apart = Streams(0, 1, "a"), Streams(0, 1, "a")
    assert draw(together, "x", 2) + draw(together, "x", 2) == [
        *torch.rand(2, generator=apart("x")).tolist(),
        *torch.rand(2, generator=apart("x")).tolist(),
    ]
    assert together("x") is together("x")
    assert draw(Streams(0, 1, "a"), "x") != draw(together, "x")


def test_the_host_s_stream_is_fresh_each_time_and_has_the_same_seed() -> None:
    streams = Streams(3, 7, "a")
    first = torch.randperm(50, generator=streams.host("order"))
    assert torch.equal(first, torch.randperm(50, generator=streams.host("order")))
    assert streams.host("order").initial_seed() == streams.seed("order") == streams("order").initial_seed()


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    draw(Streams(0, 1, "a"), "x")
    assert torch.equal(torch.rand(3), wanted)

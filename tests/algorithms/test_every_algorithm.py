"""What holds for every algorithm: how entries that are no parameters are put together, and that nothing is lost or
counted twice when a client is refused, or when a weight has two names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedfa.data.federation import ClientIndex
from fedfa.engines import client as loop
from fedfa.engines.client import Local
from playing import SIZES, algorithm, play, poisoned, uneven

SETTINGS = {
    "fedavg": {},
    "fedavgm": {"beta": 0.9},
    "fedprox": {"mu": 0.5},
    "fedsam": {},
    "fedbn": {},
    "fedrobust": {"map_rate": 0.1, "map_penalty": 1.0},
    "fedmix": {},
    "fedharmo": {},
    "scaffold": {"server_rate": 0.5},
    "feddyn": {},
    "fedadam": {},
    "fedyogi": {},
    "fedadagrad": {},
    "fedfa": {},
}
AVERAGING = [name for name in SETTINGS if name != "fedbn"]
PRIVATE = ["fedbn", "fedrobust", "scaffold", "feddyn"]


DEFAULTS = {
    "fedavgm": {"beta": 0.9},
    "fedprox": {"mu": 0.01},
    "fedsam": {"rho": 0.05},
    "fedbn": {"share_average": False},
    "fedrobust": {"map_rate": 1e-3, "shift_rate": 0.02, "map_penalty": 100.0, "shift_penalty": 4.0},
    "fedmix": {"lam": 0.1, "average": 5, "products": "summed"},
    "fedharmo": {"alpha": 0.05, "amplitude": "window", "window": 0.1},
    "scaffold": {"server_rate": 1.0},
    "feddyn": {"alpha": 0.1},
    "fedadam": {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedyogi": {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedadagrad": {"beta1": 0.9, "tau": 1e-3},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_papers(name: str) -> None:
    """Those of the FedFA authors where they have any; FedOpt's server rate is tuned in its paper."""
    found = {field.name: getattr(algorithm(name), field.name) for field in fields(algorithm(name))}
    assert {setting: value for setting, value in found.items() if setting != "lr"} == DEFAULTS[name]


class Counted(nn.Module):
    """A layer with every kind of entry: a parameter, a float buffer, an integer one that is no BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("peak", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.peak.copy_(torch.maximum(self.peak, x.detach().amax((0, 2, 3))))
            self.seen.add_(torch.tensor([len(x), 1]))
        return x * self.scale.view(-1, 1, 1)


def network(name: str, **own: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = algorithm(name, **own).layer(3)
    body = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), Counted(), nn.ReLU(), *([layer] if layer else [])]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("name", AVERAGING)
def test_buffers_are_plainly_averaged(name: str, weighting: str, tmp_path: Path) -> None:
    """Every round's, of the clients that took part, with the models' weights; counters in integers, rounded down."""
    given = algorithm(name, **SETTINGS[name])
    played = play(given, network(name), uneven(), tmp_path, 3, participation=0.75, weighting=weighting)
    buffers = ("1.running_mean", "1.running_var", "2.peak")
    counters = ("1.num_batches_tracked", "2.seen")
    for record, server in zip(played.records, played.states[1:], strict=True):
        sent = [(SIZES[c] if weighting == "samples" else 1, played.sent[record.round, c].model) for c in record.clients]
        total = sum(weight for weight, _ in sent)
        for entry in buffers:
            mean = sum(weight * model[entry].double() for weight, model in sent) / total
            assert torch.equal(server.model[entry], mean.float()), entry
        for entry in counters:
            assert server.model[entry].dtype == torch.int64
            assert torch.equal(server.model[entry], sum(weight * model[entry] for weight, model in sent) // total)
    assert not [key for key in played.server.memory if key.endswith((*buffers, *counters))]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_counts_once(name: str, tmp_path: Path) -> None:
    """However many passes a step makes, BatchNorm's statistics move in one of them."""
    played = play(algorithm(name, **SETTINGS[name]), network(name), uneven(), tmp_path, local=Local(2, 4, lr=0.1))
    for client in SIZES:
        sent = {**played.sent[1, client].model, **played.kept(client)}
        assert sent["1.num_batches_tracked"].item() == played.sent[1, client].steps > 0


@pytest.mark.parametrize("name", PRIVATE)
def test_a_refused_client_keeps_what_it_had(name: str, tmp_path: Path) -> None:
    """A NaN in round 2: the client's memory is still round 1's, it goes on from there in round 3, and the others'
    moved on."""
    given = poisoned(algorithm(name, **SETTINGS[name]), "b", 2)
    kept = {}
    for rounds in (1, 2, 3):
        played = play(given, network(name), uneven(), tmp_path / str(rounds), rounds)
        kept[rounds] = {client: played.kept(client) for client in SIZES}
    assert list(played.records[1].refused) == ["b"] and not played.records[2].refused
    assert all(torch.equal(kept[1]["b"][key], kept[2]["b"][key]) for key in kept[1]["b"])
    assert any(not torch.equal(kept[1]["a"][key], kept[2]["a"][key]) for key in kept[1]["a"])
    assert any(not torch.equal(kept[2]["b"][key], kept[3]["b"][key]) for key in kept[2]["b"])
    for memory in kept[3].values():
        assert all(torch.isfinite(tensor).all() for tensor in memory.values())


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if name not in ("fedmix", "fedharmo", "scaffold", "feddyn")]
)
def test_a_refused_client_does_no_harm(name: str, tmp_path: Path) -> None:
    """The server's state after a round with a NaN is that of a round without the client. (Shares are given before;
    for SCAFFOLD and FedDyn, whose rules know how many clients there are, see their own tests.)"""
    given = algorithm(name, **SETTINGS[name])
    played = play(poisoned(given, "b", 1), network(name), uneven(), tmp_path / "a", 1)
    without = play(given, network(name), uneven(), tmp_path / "b", 1, held_out=("b",))
    assert list(played.records[0].refused) == ["b"]
    for mine, theirs in ((played.server.model, without.server.model), (played.server.memory, without.server.memory)):
        assert mine.keys() == theirs.keys()
        assert not [entry for entry in mine if not torch.equal(mine[entry], theirs[entry])]


@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_after_a_refusal_are_finite(name: str, tmp_path: Path) -> None:
    played = play(poisoned(algorithm(name, **SETTINGS[name]), "b", 2), network(name), uneven(), tmp_path, 3)
    assert [list(record.refused) for record in played.records] == [[], ["b"], []]
    for tensors in (played.server.model, played.server.memory):
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_client_without_samples_is_passed_over(name: str, tmp_path: Path) -> None:
    """It has nothing to share, and no step to make: the others' result is as without it."""
    data = uneven()
    none = torch.zeros(0, dtype=torch.int64)
    more = replace(data, clients={**data.clients, "e": ClientIndex(none, none, none)})
    given = algorithm(name, **SETTINGS[name])
    plain = play(given, network(name), data, tmp_path / "plain", 2)
    played = play(given, network(name), more, tmp_path / "more", 2)
    assert [list(record.refused) for record in played.records] == [["e"], ["e"]]
    assert not played.kept("e")
    if name in ("scaffold", "feddyn"):  # their rules know how many clients there are
        assert all(torch.isfinite(tensor).all() for tensor in played.model.values())
    else:
        assert not [entry for entry in plain.model if not torch.equal(plain.model[entry], played.model[entry])]


@pytest.mark.parametrize("name", SETTINGS)
def test_private_memory_and_kept_optimisers_share_a_folder(name: str, tmp_path: Path) -> None:
    local = Local(batch_size=4, lr=0.05, momentum=0.5, optimizer_state="kept")
    played = play(algorithm(name, **SETTINGS[name]), network(name), uneven(), tmp_path, 2, local)
    kept = played.kept("a")
    assert any(key.startswith("optimizer/") for key in kept)
    assert any(not key.startswith("optimizer/") for key in kept) == (name in PRIVATE)


class FromHost(TorchDispatchMode):
    """Nothing is made of Python's numbers, and none is read: on a GPU the one is a copy, the other a wait, and a CUDA
    graph can hold neither."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)
        return function(*args, **(kwargs or {}))


ENDS: list[tuple[str, dict[str, Any]]] = [
    *((name, own) for name, own in SETTINGS.items() if name not in PRIVATE),
    *(("fedfa", {"statistics": statistics}) for statistics in ("corrected", "released")),
    *((name, {"statistics": "paper"}) for name in ("fedfa-r", "fedfa-c", "fedfa-direct", "fedfa-total")),
]


@pytest.mark.parametrize(("name", "own"), ENDS)
def test_what_a_client_begins_and_ends_with_can_be_captured(
    name: str, own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, ends = algorithm(name, **own), 0

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            nonlocal ends
            ends += 1
            with FromHost():
                return hook(*args)

        return within

    for owner, hook in ((type(given), "begin"), (type(given), "end"), (loop, "enter"), (loop, "leave")):
        monkeypatch.setattr(owner, hook, watched(getattr(owner, hook)))
    play(given, network(name, **own), uneven(), tmp_path, 2)
    assert ends == 2 * 4 * len(SIZES)


class Tied(nn.Module):
    """One weight under two names, as where an embedding is also the last layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(60, 60, bias=False)
        if tied:
            self.second = nn.Linear(60, 60, bias=False)
            self.second.weight = self.first.weight
        self.last = nn.Linear(60, 3)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        x = torch.tanh((self.second if self.tied else self.first)(x))
        return self.last(x)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("fedbn", "fedfa")])
def test_a_weight_with_two_names_counts_once(name: str, tmp_path: Path) -> None:
    """A layer used twice, or two layers that share a weight: the same network, and the same result."""
    ends = []
    for tied in (True, False):
        torch.manual_seed(0)
        model = Tied(tied)
        if tied:
            model.load_state_dict(Tied(False).state_dict(), strict=False)
        ends.append(play(algorithm(name, **SETTINGS[name]), model, uneven(), tmp_path / str(tied), 2).model)
    for entry, tensor in ends[1].items():
        torch.testing.assert_close(ends[0][entry], tensor, rtol=1e-5, atol=1e-6)
    assert torch.equal(ends[0]["second.weight"], ends[0]["first.weight"])

"""Every algorithm against the same rule written another way (`tests/reference`), in float64, over whole federations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfa.data.federation import Federation
from fedfa.engines.client import Local, batches
from fedfa.server import sample_clients
from fedfa.streams import Streams
from fedfa.task import Classification, Segmentation
from playing import Played, algorithm, one_hot, plan_for, play, uneven
from reference import federation as dense
from reference import rules
from reference.networks import (
    Convolutional,
    Network,
    SoftmaxRegression,
    State,
    cross_entropy,
    cross_entropy_and_dice,
)

ROUNDS, SEED = 3, 0
TOLERANCE = 1e-5
"""Largest difference of an entry, relative to the largest number in it."""


@dataclass(frozen=True)
class Case:
    """An algorithm with settings that show, its reference, and how far its result must be from FedAvg's."""

    rule: type[rules.FedAvg]
    settings: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] | None = None
    """The reference's settings, where they have other names."""


CASES = {
    "fedavg": Case(rules.FedAvg),
    "fedavgm": Case(rules.FedAvgM, {"beta": 0.7}),
    "fedprox": Case(rules.FedProx, {"mu": 0.8}),
    "fedsam": Case(rules.FedSAM, {"rho": 0.3}),
    "fedbn": Case(rules.FedBN),
    "fedbn, shared": Case(rules.FedBN, {"share_average": True}),
    "fedrobust": Case(rules.FedRobust, {"map_rate": 0.4, "shift_rate": 0.6, "map_penalty": 0.7, "shift_penalty": 0.3}),
    "fedmix": Case(rules.FedMix, {"lam": 0.3, "average": 3}, {"lam": 0.3, "average_of": 3}),
    "fedmix, averaged": Case(
        rules.FedMix,
        {"lam": 0.3, "average": 3, "products": "averaged"},
        {"lam": 0.3, "average_of": 3, "averaged": True},
    ),
    "fedmix, all": Case(rules.FedMix, {"lam": 0.2, "average": 0}, {"lam": 0.2, "average_of": 0}),
    "fedharmo": Case(rules.FedHarmo, {"alpha": 0.2, "window": 0.25}),
    "fedharmo, dc": Case(rules.FedHarmo, {"alpha": 0.2, "amplitude": "dc"}),
    "fedharmo, none": Case(rules.FedHarmo, {"alpha": 0.2, "amplitude": "none"}),
    "scaffold": Case(rules.Scaffold, {"server_rate": 0.8}),
    "feddyn": Case(rules.FedDyn, {"alpha": 0.5}),
    "fedadam": Case(rules.FedOpt, {"lr": 0.1, "beta1": 0.6, "beta2": 0.9, "tau": 0.01}),
    "fedyogi": Case(
        rules.FedOpt,
        {"lr": 0.1, "beta1": 0.6, "beta2": 0.9, "tau": 0.03},
        {"lr": 0.1, "beta1": 0.6, "beta2": 0.9, "tau": 0.03, "moment": "yogi"},
    ),
    "fedadagrad": Case(
        rules.FedOpt,
        {"lr": 0.1, "beta1": 0.6, "tau": 0.02},
        {"lr": 0.1, "beta1": 0.6, "tau": 0.02, "moment": "adagrad"},
    ),
}

LOCAL = Local(epochs=2, batch_size=4, lr=0.1, lr_decay=0.8)


def network(kind: str = "convolutional") -> tuple[nn.Module, Network]:
    """The network as a module, and as a function of a flat vector."""
    torch.manual_seed(1)
    if kind == "softmax":
        return nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), SoftmaxRegression(60, 3)
    if kind == "dense":
        body = (nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.Tanh())
        return nn.Sequential(*body, nn.Conv2d(3, 3, 1)), Convolutional(2, 3, 3, 0, dense=True)
    body = (nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(36, 3)), Convolutional(2, 3, 3, 12)


def federation(kind: str) -> Federation:
    return uneven(task="segmentation" if kind == "dense" else "classification")


@dataclass
class Outcome:
    """What the reference says."""

    model: dict[str, Tensor]
    rule: rules.FedAvg
    sites: dict[str, rules.Site]
    net: Network


@cache
def expected(
    case: str,
    kind: str = "convolutional",
    local: Local = LOCAL,
    participation: float = 1.0,
    weighted: bool = False,
) -> Outcome:
    """Play the reference, with fedfa's choice of clients, order of batches and draws."""
    data = federation(kind)
    module, net = network(kind)
    plan = plan_for(data, ROUNDS, participation, seed=SEED)
    train = {name: data.clients[name].train for name in plan.clients}
    sites = {name: rules.Site(name, *one_hot(data, index)) for name, index in train.items()}
    for name, site in sites.items():
        site.order = torch.randperm(len(site.x), generator=Streams(SEED, 0, name).host("fedmix"))

    def order(turn: int, name: str) -> Iterator[Tensor]:
        return batches(torch.arange(len(train[name])), local, Streams(SEED, turn, name).host("order"))

    schedule = dense.Schedule(
        chosen=lambda turn: sample_clients(plan, turn),
        order=order,
        draw=lambda turn, name: Streams(SEED, turn, name)("fedmix"),
        optimizer=lambda turn: dense.Sgd(local.lr * local.lr_decay ** (turn - 1), local.momentum, local.weight_decay),
        weighted=weighted,
    )
    loss = cross_entropy_and_dice if kind == "dense" else cross_entropy
    wanted = CASES[case]
    rule = wanted.rule(net, loss, len(sites), **(wanted.settings if wanted.given is None else wanted.given))
    state = dense.play(rule, sites, net.flat(module.state_dict()), schedule, ROUNDS)
    return Outcome(net.named(state), rule, sites, net)


def found(case: str, folder: Path, kind: str = "convolutional", local: Local = LOCAL, **options: Any) -> Played:
    """Play fedfa."""
    ours = algorithm(case.partition(",")[0], **CASES[case].settings)
    task = Segmentation() if kind == "dense" else Classification()
    return play(ours, network(kind)[0], federation(kind), folder, ROUNDS, local, task, seed=SEED, **options)


def distance(mine: Tensor, theirs: Tensor) -> float:
    scale = theirs.double().abs().max().clamp_min(1e-2)
    return float((mine.double() - theirs.double()).abs().max() / scale)


def assert_near(
    mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE, everything: bool = False
) -> None:
    """Every one of our entries is the reference's, and with `everything` none is missing."""
    assert not everything or mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.shape == theirs[name].shape, name
        if tensor.is_floating_point():
            assert distance(tensor, theirs[name]) < tolerance, name
        else:
            assert tensor.dtype == torch.int64 and torch.equal(tensor, theirs[name]), name


def assert_not_fedavg(theirs: Outcome, plain: Outcome) -> None:
    """The comparison shows something: FedAvg is hundreds of tolerances away."""
    away = [distance(theirs.model[name], plain.model[name]) for name in theirs.net.parameters]
    assert max(away) > 300 * TOLERANCE


PRIVATE: dict[str, Callable[[Outcome, rules.Site], dict[str, Tensor]]] = {
    "scaffold": lambda o, site: o.net.behind("variate", site.kept["variate"]),
    "feddyn": lambda o, site: o.net.behind("dual", site.kept["dual"]),
    "fedrobust": lambda o, site: {name: site.kept[name] for name in ("map", "shift")},
    "fedbn": lambda o, site: norms(o.net.named(State(site.kept["w"], site.kept["b"], site.kept["n"]))),
}
"""What a client keeps, by its name."""

SERVER: dict[str, Callable[[Outcome], dict[str, Tensor]]] = {
    "scaffold": lambda o: o.net.behind("variate", o.rule.c),
    "feddyn": lambda o: o.net.behind("h", o.rule.h),
    "fedmix": lambda o: {"images": torch.stack(o.rule.images), "labels": torch.stack(o.rule.labels)},
}
"""What the server keeps besides the model."""


def norms(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """BatchNorm's entries."""
    return {name: tensor for name, tensor in named.items() if name.startswith("1.")}


def assert_states_near(name: str, ours: Played, theirs: Outcome) -> None:
    """What clients keep is the reference's, and nothing if they never took part; so is what the server keeps.

    (w_t − w)/(K·lr) is a small difference over a small number: a digit is lost.
    """
    family = name.partition(",")[0]
    if family in SERVER:
        assert_near(dict(ours.server.memory), SERVER[family](theirs), 1e-4, everything=True)
    trained = {client for record in ours.records for client in record.clients}
    for client, site in theirs.sites.items():
        if family in PRIVATE and client in trained:
            assert_near(ours.kept(client), PRIVATE[family](theirs, site), 1e-4, everything=True)
        else:
            assert not ours.kept(client)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("name", CASES)
def test_three_rounds(name: str, weighting: str, participation: float, tmp_path: Path) -> None:
    theirs = expected(name, participation=participation, weighted=weighting == "samples")
    ours = found(name, tmp_path, participation=participation, weighting=weighting)
    assert_near(dict(ours.model), theirs.model)
    assert len(ours.model) == (3 if name.startswith("fedbn") else 8)
    assert_states_near(name, ours, theirs)
    if name != "fedavg":
        assert_not_fedavg(theirs, expected("fedavg", participation=participation, weighted=weighting == "samples"))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("fedbn")])
def test_softmax_regression(name: str, tmp_path: Path) -> None:
    ours, theirs = found(name, tmp_path, "softmax"), expected(name, "softmax")
    assert_near(dict(ours.model), theirs.model)
    assert_states_near(name, ours, theirs)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedsam", "fedrobust", "fedmix", "fedharmo", "feddyn"])
def test_momentum_and_weight_decay_are_the_base_optimisers(name: str, tmp_path: Path) -> None:
    """Decay pulls at w itself, not at where a perturbed gradient was taken; momentum carries the whole direction."""
    local = Local(epochs=2, batch_size=4, lr=0.05, momentum=0.8, weight_decay=0.1)
    theirs = expected(name, local=local)
    assert_near(dict(found(name, tmp_path, local=local).model), theirs.model)
    if name != "fedavg":
        assert_not_fedavg(theirs, expected("fedavg", local=local))


@pytest.mark.parametrize("name", ["fedmix", "fedmix, all", "fedsam", "fedharmo", "fedrobust"])
def test_segmentation(name: str, tmp_path: Path) -> None:
    theirs = expected(name, "dense")
    assert_near(dict(found(name, tmp_path, "dense").model), theirs.model)
    assert_not_fedavg(theirs, expected("fedavg", "dense"))

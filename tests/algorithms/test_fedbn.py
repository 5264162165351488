"""FedBN: by hand, which layers it finds, what leaves a client, and whom it evaluates with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedfa
from fedfa import Algorithm, Federation
from fedfa.engines import client as loop
from fedfa.engines.client import Local
from playing import Squares, algorithm, play, points, uneven

FEDBN, SHARED = algorithm("fedbn"), algorithm("fedbn", share_average=True)


class Normal(nn.BatchNorm2d):
    """Somebody's own BatchNorm."""


def test_by_hand(tmp_path: Path) -> None:
    """f = BatchNorm(x) with one channel, loss ½(f − y)²: the shift's gradient is shift − y, since x̂ has mean 0.
    At rate ½ from 0: a (y = 1) 0.5, then 0.75; b (y = 3) 1.5, then 2.25, each its own. FedAvg: 1, then 1.5.
    Running means: a tenth of 0.4 (0.2 and 0.6), then 0.9·0.04 + 0.04 = 0.076; of 0.8 (0.6 and 1): 0.08, then 0.152."""
    data = points(a=[([0.2], 1), ([0.6], 1)], b=[([0.6], 3), ([1.0], 3)])
    local = Local(batch_size=2, lr=0.5)
    task = Flat()
    for rounds, shifts, means in ((1, (0.5, 1.5), (0.04, 0.08)), (2, (0.75, 2.25), (0.076, 0.152))):
        played = play(FEDBN, nn.Sequential(nn.BatchNorm2d(1)), data, tmp_path / str(rounds), rounds, local, task)
        assert not played.model
        for client, shift, mean in zip("ab", shifts, means, strict=True):
            kept = played.kept(client)
            assert kept["0.bias"].item() == pytest.approx(shift, rel=1e-6)
            assert kept["0.running_mean"].item() == pytest.approx(mean, rel=1e-6)
            assert kept["0.num_batches_tracked"].item() == rounds
    plain = play(algorithm("fedavg"), nn.Sequential(nn.BatchNorm2d(1)), data, tmp_path, 2, local, task)
    assert plain.model["0.bias"].item() == pytest.approx(1.5, rel=1e-6)


class Flat(Squares):
    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return super().loss(output.flatten(), y)


class TestWhatIsFound:
    def test_by_type_and_never_by_name(self) -> None:
        model = nn.ModuleDict(
            {
                "bn": nn.Linear(2, 2),
                "norm": nn.GroupNorm(1, 2),
                "batch_norm": nn.LayerNorm(2),
                "bn_like": nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
                "one": nn.BatchNorm1d(2),
                "deep": nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(nn.BatchNorm2d(2))),
                "three": nn.BatchNorm3d(2),
                "sync": nn.SyncBatchNorm(2),
                "odd": Normal(2),
                "plain": nn.BatchNorm2d(2, affine=False),
                "stateless": nn.BatchNorm2d(2, track_running_stats=False),
            }
        )
        found = FEDBN.private(model)
        assert {name.rpartition(".")[0] for name in found} == {
            "one", "deep.1.0", "three", "sync", "odd", "plain", "stateless",
        }  # fmt: skip
        every = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
        assert {name.rpartition(".")[2] for name in found if name.startswith("deep")} == every
        assert {name.rpartition(".")[2] for name in found if name.startswith("plain")} == every - {"weight", "bias"}
        assert SHARED.private(model) == found

    def test_a_network_that_is_a_batchnorm(self) -> None:
        assert FEDBN.private(nn.BatchNorm1d(2)) == set(nn.BatchNorm1d(2).state_dict())

    def test_none(self) -> None:
        assert FEDBN.private(nn.Linear(2, 2)) == frozenset()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), Normal(3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def test_what_is_kept_is_copied_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are: on a GPU every copy is a launch, for every client in every round."""
    launches: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            launches[-1] += not function.is_view
            return function(*args, **(kwargs or {}))

    plain = loop.leave

    def leave(*args: Any) -> Any:
        launches.append(0)
        with Count():
            return plain(*args)

    monkeypatch.setattr(loop, "leave", leave)
    for layers in (1, 6):
        model = nn.Sequential(*(Normal(2) for _ in range(layers)), nn.Flatten(), nn.Linear(60, 3))
        play(FEDBN, model, uneven(), tmp_path / str(layers), rounds=1)
    assert set(launches) == {2}  # its floats, and its counters


class TestWhatLeaves:
    def test_not_in_updates_server_or_reports(self, tmp_path: Path) -> None:
        played = play(FEDBN, network(), uneven(), tmp_path, rounds=2)
        rest = {"0.weight", "0.bias", "4.weight", "4.bias"}
        for update in played.sent.values():
            assert update.model.keys() == rest
            assert not update.report.means and not update.report.spreads
        for server in played.states:
            assert server.model.keys() == rest and not server.memory
        for client in "abcd":
            assert played.kept(client).keys() == network().state_dict().keys() - rest

    def test_with_the_opt_in_the_average_does(self, tmp_path: Path) -> None:
        played = play(SHARED, network(), uneven(), tmp_path, rounds=2, weighting="samples")
        own = [played.kept(client) for client in "abcd"]
        for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
            mean = torch.stack([kept[name] for kept in own]).mean(0)
            torch.testing.assert_close(played.server.memory[name], mean, rtol=1e-6, atol=1e-7)
        assert not [name for name in played.model if name.startswith("1.")]


def losses(model: nn.Module, data: Federation, client: str) -> float:
    x, y = data.batch(data.clients[client].test)
    return nn.functional.cross_entropy(model.eval()(x), y).item()


class TestEvaluation:
    @pytest.mark.parametrize("given", [FEDBN, SHARED], ids=["own", "shared"])
    def test_each_with_its_own(self, given: Algorithm, tmp_path: Path) -> None:
        data = uneven()
        played = play(given, network(), data, tmp_path, rounds=2)
        assert played.records[-1].test is not None
        scores = played.records[-1].test.clients
        for client in "abcd":
            model = network()
            model.load_state_dict({**played.model, **played.kept(client)})
            assert scores[client].loss == pytest.approx(losses(model, data, client), rel=1e-5)

    def test_one_that_never_trained_gets_the_average(self, tmp_path: Path) -> None:
        data = uneven(held_out={"e": 3})
        played = play(SHARED, network(), data, tmp_path, rounds=2, held_out=("e",))
        assert played.records[-1].test is not None
        model = network()
        model.load_state_dict({**played.model, **played.server.memory}, strict=False)
        score = played.records[-1].test.clients["e"].loss
        assert score == pytest.approx(losses(model, data, "e"), rel=1e-5)
        assert not played.kept("e")


def test_checkpoints(tmp_path: Path, tiny: dict[str, object]) -> None:
    """The server's file has BatchNorm's average if that was asked for, and none of it otherwise."""
    for share, wanted in ((False, set()), (True, {"weight", "bias", "running_mean", "running_var"})):
        settings = {"algorithm": {"name": "fedbn", "share_average": share}}
        run = fedfa.run(tiny, root=tmp_path / str(share), **settings)
        latest = run.latest()
        assert latest is not None
        server = latest[0]
        assert not [name for name in server.model if name.startswith("stage.1.")]
        assert {name.removeprefix("stage.1.") for name in server.memory} >= wanted
        assert bool(server.memory) == share

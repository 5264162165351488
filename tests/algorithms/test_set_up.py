"""What algorithms say before a run: objections, notices, and what is sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedfa
from fedfa import Run, UserError
from fedfa.algorithms.base import Share
from fedfa.cli import app
from fedfa.engines.client import Client
from fedfa.reduction import Report
from fedfa.server import Watcher


class Listening(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noticed(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9}])
def test_scaffold_objects_to_other_optimisers(
    settings: dict[str, Any], tiny: dict[str, Any], tmp_path: Path, tiny_file: Path
) -> None:
    with pytest.raises(UserError, match="scaffold's control variates are gradients under plain SGD alone"):
        fedfa.run(tiny, root=tmp_path / "runs", algorithm="scaffold", **settings)
    assert not (tmp_path / "runs").exists()
    words = ["run", str(tiny_file), "algorithm=scaffold", *(f"{key}={value}" for key, value in settings.items())]
    refused = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "runs")])
    assert refused.exit_code == 2 and "say optimizer=sgd momentum=0" in refused.stderr


def test_fedbn_needs_leave_to_serve_a_client_that_never_trains(play: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match=r"fedbn has no BatchNorm for 'west'.*algorithm.share_average=true"):
        play(algorithm="fedbn", held_out="west")
    served = play(algorithm="fedbn", held_out="west", **{"algorithm.share_average": True})
    assert served.metrics[-1]["test"]["unseen"] is not None
    (line,) = served.provenance["notices"]
    assert "BatchNorm leaves the clients, averaged" in line


def test_fedbn_without_batchnorm_says_that_it_is_fedavg(tmp_path: Path) -> None:
    watcher = Listening()
    fedfa.run("digit-sites", root=tmp_path, algorithm="fedbn", rounds=1, held_out="fax", watcher=watcher)
    assert watcher.lines == ["fedbn: the network has no BatchNorm, so this is FedAvg"]


def test_fedmix_says_what_leaves_in_the_log_and_in_the_run(play: Callable[..., Run], tiny_file: Path) -> None:
    wanted = "fedmix: averaged training images and labels (5 at a time) leave the clients and go to all of them"
    watcher = Listening()
    run = play(algorithm="fedmix", watcher=watcher)
    assert watcher.lines == [wanted] == run.provenance["notices"]
    for quiet in ([], ["--quiet"]):
        shown = CliRunner().invoke(
            app, ["run", str(tiny_file), "algorithm=fedmix", "--force", "--out", str(run.folder.parent), *quiet]
        )
        assert shown.exit_code == 0 and wanted in shown.stderr


def test_a_comparison_repeats_what_the_runs_said(play: Callable[..., Run]) -> None:
    runs = [play(algorithm="fedbn", held_out="west", seed=seed, **{"algorithm.share_average": True}) for seed in (0, 1)]
    compared = CliRunner().invoke(app, ["compare", *(str(run.folder) for run in runs)])
    assert compared.exit_code == 0
    assert compared.stdout.count("clients that never trained are tested with it") == 1


def test_all_of_a_clients_data_in_one_average(play: Callable[..., Run]) -> None:
    run = play(algorithm="fedmix", **{"algorithm.average": 0})
    assert "all of a client's together" in run.provenance["notices"][0]
    latest = run.latest()
    assert latest is not None and latest[0].memory["images"].shape[0] == 3


@pytest.mark.parametrize("name", ["fedmix", "fedharmo"])
def test_what_never_changes_is_counted_once(name: str, play: Callable[..., Run]) -> None:
    first, *rest = [line["bytes_down"] for line in play(algorithm=name).metrics]
    plain = play(algorithm="fedavg").metrics[0]["bytes_down"]
    assert set(rest) == {plain}
    latest = play(algorithm=name).latest()
    assert latest is not None
    assert first - plain == sum(4 * tensor.numel() for tensor in latest[0].memory.values())


def test_scaffold_and_share_average_send_theirs_every_round(play: Callable[..., Run]) -> None:
    plain = play(algorithm="fedavg").metrics[0]
    counters = 8  # `num_batches_tracked`, which has no variate
    statistics = 2 * 4 * 4
    for line in play(algorithm="scaffold").metrics:
        for way in ("bytes_up", "bytes_down"):
            assert line[way] == 2 * plain[way] - counters - statistics


class TestShares:
    """A bad share does no harm, and a client with nothing to share is passed over."""

    @staticmethod
    def spoilt(monkeypatch: pytest.MonkeyPatch, name: str, share: Callable[[Client, Share], Share]) -> None:
        kind = fedfa.ALGORITHMS[name]
        original = kind.share

        def other(self: Any, client: Client) -> Share:
            given = original(self, client)
            return share(client, given) if client.name == "south" else given

        monkeypatch.setattr(kind, "share", other)

    def test_a_picture_that_is_not_finite(self, play: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
        whole = play(algorithm="fedmix").latest()

        def spoil(client: Client, share: Share) -> Share:
            images = share.gathered["images"].clone()
            images[0, 0, 0, 0] = torch.nan
            return Share(gathered={**share.gathered, "images": images})

        self.spoilt(monkeypatch, "fedmix", spoil)
        watcher = Listening()
        left = play(root="other", algorithm="fedmix", watcher=watcher).latest()
        assert watcher.lines[-1] == "what south shares is left out: images is not finite"
        assert whole is not None and left is not None
        assert len(left[0].memory["images"]) == len(whole[0].memory["images"]) - 2  # ten samples, five at a time
        assert left[0].memory["images"].isfinite().all()

    def test_a_spectrum_of_another_shape(self, play: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoilt(monkeypatch, "fedharmo", lambda client, share: Share(Report({"amplitude": torch.ones(2)})))
        watcher = Listening()
        run = play(algorithm="fedharmo", watcher=watcher)
        assert "what south shares is left out: amplitude is (2,)" in watcher.lines[-1]
        assert run.done

    @pytest.mark.parametrize("name", ["fedmix", "fedharmo"])
    def test_a_client_without_training_samples(self, name: str, tiny: dict[str, Any], tmp_path: Path) -> None:
        source = {"name": "tiny", "train": [14, 0, 7]}
        run = fedfa.run(tiny, root=tmp_path, algorithm=name, source=source)
        assert run.done and set(run.metrics[-1]["refused"]) == {"south"}
        latest = run.latest()
        assert latest is not None and all(t.isfinite().all() for t in latest[0].memory.values())


@pytest.mark.parametrize(
    ("name", "setting", "value", "complaint"),
    [
        ("fedavgm", "beta", 1.0, "beta is between 0 and 1 (1 excluded), not 1.0"),
        ("fedprox", "mu", -1.0, "mu is a number from 0 on, not -1.0"),
        ("fedsam", "rho", float("inf"), "rho is a number from 0 on, not inf"),
        ("fedrobust", "map_rate", -0.1, "map_rate is a number from 0 on"),
        ("fedmix", "lam", 1.0, "lam is between 0 and 1"),
        ("fedmix", "average", -1, "average is a number from 0 on, not -1"),
        ("fedharmo", "window", 0.5, "window is a share of the image's side"),
        ("scaffold", "server_rate", -1.0, "server_rate is a number from 0 on"),
        ("feddyn", "alpha", 0.0, "alpha is above 0"),
        ("fedadam", "beta2", 1.5, "beta2 is between 0 and 1"),
        ("fedyogi", "tau", 0.0, "tau is above 0"),
        ("fedadagrad", "lr", -0.1, "lr is a number from 0 on"),
    ],
)
def test_settings_that_make_no_sense(
    name: str, setting: str, value: float, complaint: str, tiny: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as found:
        fedfa.load(tiny, {"algorithm": name, f"algorithm.{setting}": value})
    assert complaint in str(found.value)


def test_extras_reach_evaluation_of_the_first_checkpoint(play: Callable[..., Run]) -> None:
    """A resumed run of an algorithm that shares has its shares from the checkpoint: nothing is asked for again."""
    whole = play(algorithm="fedharmo", rounds=4, checkpoint_every=2)
    latest = whole.latest()
    assert latest is not None
    amplitude: Tensor = latest[0].memory["amplitude"]
    (whole.folder / "done").unlink()
    (whole.folder / "checkpoints" / "round-00004.safetensors").unlink()
    fedfa.simulate.resume(whole.folder)
    again = whole.latest()
    assert again is not None and torch.equal(again[0].memory["amplitude"], amplitude)
    assert [line["round"] for line in whole.metrics] == [1, 2, 3, 4]

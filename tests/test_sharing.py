"""Runs that share one GPU from threads of one process. All of it needs a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedfa
from fedfa.errors import UserError
from fedfa.experiment import Experiment, load
from fedfa.runs import find_run
from fedfa.server import Record, Watcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def experiment(seed: int, **own: object) -> Experiment:
    return load(
        "digit-sites",
        {"rounds": 8, "device": "cuda", "engine": "captured", "seed": seed, "precision": "float32", **own},
    )


def shared(experiments: list[Experiment], root: Path, watcher: Watcher | None = None, at_once: int = 0) -> dict:
    from fedfa.sharing import share_gpu

    return {e.title: out for e, out in share_gpu(experiments, root, lambda _: watcher or Watcher(), at_once)}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "fedbn", "scaffold"])
def test_runs_side_by_side_are_what_they_are_alone(algorithm: str, tmp_path: Path) -> None:
    experiments = [experiment(seed, algorithm=algorithm) for seed in range(6)]
    found = shared(experiments, tmp_path / "together", at_once=6)
    for one in experiments[::3]:
        alone = fedfa.run(one, root=tmp_path / "alone")
        losses = [[line["loss"] for line in run.metrics[:4]] for run in (alone, found[one.title])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert "beside" not in alone.provenance and find_run(found[one.title].folder).provenance["beside"] == 5
    first = {out.metrics[3]["loss"] for out in found.values()}
    assert len(first) == len(experiments)


def test_runs_with_last_batches_of_all_sizes(tmp_path: Path) -> None:
    """Lanes capture in most rounds then, while others' steps are replayed or run eagerly."""
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = draw.integers(256, size=(300, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] = np.arange(300) % 10
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    uneven = {
        "source": {"name": "cifar10", "path": str(tmp_path)},
        "partition": {"name": "dirichlet", "clients": 40, "alpha": 0.6, "smallest": 2},
        "network": {"name": "resnet18", "width": 0.25},
        "participation": 0.25,
        "batch_size": 10,
    }
    experiments = [experiment(seed, algorithm="fedfa", precision="bf16", **uneven) for seed in range(6)]
    found = shared(experiments, tmp_path / "together", at_once=6)
    assert all(out.done and not out.provenance.get("notices") for out in found.values())
    alone = fedfa.run(experiments[0], root=tmp_path / "alone")
    losses = [run.metrics[0]["loss"] for run in (alone, found[experiments[0].title])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_precisions_go_one_after_another_and_a_mistake_ends_no_other(tmp_path: Path) -> None:
    good = [experiment(seed, precision=precision) for seed in range(2) for precision in ("tf32", "float32")]
    bad = experiment(0, held_out=["nobody"])
    found = shared([*good, bad], tmp_path)
    assert isinstance(found[bad.title], UserError)
    assert all(found[one.title].done for one in good)


class Impatient(Watcher):
    def round_done(self, record: Record) -> None:
        if record.round == 4:
            raise KeyboardInterrupt


def test_stopped_and_continued(tmp_path: Path) -> None:
    experiments = [experiment(seed) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        shared(experiments, tmp_path / "stopped", Impatient())
    assert not list((tmp_path / "stopped").glob("*/done"))
    found = shared(experiments, tmp_path / "stopped")
    whole = shared(experiments, tmp_path / "whole")
    for one in experiments:
        losses = [[line["loss"] for line in runs[one.title].metrics] for runs in (found, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)

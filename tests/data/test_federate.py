"""From pool to federation: files of splits, experiments' keys, and federations that come divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pools import everything, make_pool, sizes
from typer.testing import CliRunner

import fedfa
from fedfa import Run, UserError, load
from fedfa.cli import app
from fedfa.data.federate import divide, federate
from fedfa.data.partition import IID, Natural
from fedfa.data.pool import Pool, Problem
from fedfa.data.splitfile import read_splits, write_splits
from fedfa.data.splits import Shares, Splits
from fedfa.registries import Reader
from fedfa.simulate import Parts

SITES = ["north"] * 40 + ["south"] * 30 + ["west"] * 20


@dataclass(frozen=True)
class Stripes:
    """Striped images at three sites, as a source on disk would read them."""

    broken: int = 0
    shares: ClassVar[Shares] = Shares(0.2, 0.32)

    def pool(self) -> Pool:
        labels = [number % 3 for number in range(90)]
        images = torch.zeros(90, 3, 12, 12, dtype=torch.uint8)
        for number, kind in enumerate(labels):
            images[number, :, kind :: kind + 2] = 200 - number
        problems = tuple(Problem(f"{n}.png", "broken: no bytes; left out") for n in range(self.broken))
        return replace(make_pool(labels, sites=SITES), images=images, classes=("a", "b", "c"), problems=problems)


if "stripes" not in list(fedfa.SOURCES):
    fedfa.SOURCES.register("stripes", Stripes, "striped images, undivided")

STRIPES = {
    "name": "stripes",
    "source": "stripes",
    "network": "tiny-net",
    "rounds": 2,
    "batch_size": 8,
    "device": "cpu",
    "threads": 1,
}


def clients_of(**settings: Any) -> dict[str, tuple[int, int, int]]:
    federation = Parts.build(load(STRIPES, settings)).federation
    return {name: sizes(index) for name, index in federation.clients.items()}


# Experiments


def test_a_source_s_own_shares_unless_others_are_asked_for() -> None:
    assert isinstance(Stripes(), Reader)
    assert clients_of() == {"north": (19, 13, 8), "south": (14, 10, 6), "west": (9, 7, 4)}
    assert clients_of(**{"split.val": 0.2})["north"] == (24, 8, 8)
    assert clients_of(**{"split.test": 0.5, "split.val": 0, "split.rounding": "down"})["west"] == (10, 0, 10)
    assert clients_of(**{"split.fraction": "1/6", "split.smallest": 3}) == {
        "north": (3, 13, 8),
        "south": (3, 10, 6),
        "west": (3, 7, 4),
    }


def test_partitions_by_name() -> None:
    assert list(clients_of(partition="iid", **{"partition.clients": 4})) == [f"client-{n}" for n in range(4)]
    dirichlet = clients_of(partition={"name": "dirichlet", "clients": 3, "alpha": 0.5, "smallest": 5})
    assert sum(map(sum, dirichlet.values())) == 90
    assert len({sum(part) for part in clients_of(**{"partition": "sizes", "partition.clients": 5}).values()}) > 1


def test_seeds_of_runs_and_of_splits() -> None:
    def tested(**settings: Any) -> list[int]:
        return Parts.build(load(STRIPES, settings)).federation.clients["north"].test.tolist()

    assert tested(seed=1) != tested(seed=2)
    assert tested(seed=1, **{"split.seed": 7}) == tested(seed=2, **{"split.seed": 7}) == tested(seed=7)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"partition": "dirichlett"}, "no partition is named 'dirichlett'; did you mean 'dirichlet'?"),
        (
            {"partition": "dirichlet", "partition.alfa": 0.3},
            "partition 'dirichlet' has no setting 'alfa'; did you mean 'alpha'?",
        ),
        ({"partition": "dirichlet", "partition.alpha": -1}, "partition: alpha is above 0, not -1"),
        ({"split.tests": 0.2}, "split has no setting 'tests'; did you mean 'test'?"),
        ({"split.test": 2}, "split: test is a share, between 0 and 1, not 2"),
        ({"split.fraction": "a lot"}, "split: fraction is a number between 0 and 1, or such as '1/6', not 'a lot'"),
        ({"split.by": "patient"}, "split.by: should be 'group', 'sample' or 'slice', not 'patient'"),
        ({"split": 0.2}, "split is a table of settings, such as split.test=0.2, not 0.2"),
        ({"splt.test": 0.2}, "'splt.test': 'splt' has no settings of its own; source, network, algorithm,"),
    ],
)
def test_mistakes_in_one_line(overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(STRIPES, overrides)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_what_is_shown_can_be_run_and_digests_tell_divisions_apart(tmp_path: Path) -> None:
    config = load(STRIPES, {"partition": "iid", "split.fraction": "1/6"})
    shown = tmp_path / "shown.toml"
    shown.write_text(config.toml())
    assert load(shown) == config and load(shown).digest() == config.digest()
    assert config.split["fraction"] == pytest.approx(1 / 6) and config.partition["clients"] == 100
    plain = load(STRIPES).digest()
    assert plain == load(STRIPES, {"partition": "natural", "split": {}, "split.by": "group"}).digest()
    others = [
        {"partition": "iid"},
        {"partition.clients": 2},
        {"split.test": 0.2},
        {"split.seed": 0},
        {"split.by": "slice"},
        {"split.given": False},
    ]
    assert len({plain, *(load(STRIPES, other).digest() for other in others)}) == 1 + len(others)


def test_files_that_were_left_out_are_told_of() -> None:
    federation = federate(Stripes(broken=2), Natural(), Splits(), 0)
    assert federation.notes == (
        "made-up: 2 files or folders were left out (0.png: broken: no bytes; left out); fedfa data check says which",
    )


def test_fatal_problems_end_it() -> None:
    pool = replace(make_pool([0] * 5), problems=(Problem("a.png", "is odd", fatal=True), Problem("", "x", fatal=True)))
    with pytest.raises(UserError, match=r"^made-up: a\.png: is odd \(and 1 more: fedfa data check says which\)$"):
        divide(pool, Natural(), Splits(), 0)


def test_clients_with_nothing_to_train_on() -> None:
    pool = make_pool([0] * 9, sites=["a"] * 5 + ["b"] * 4, given=["train"] * 5 + ["test"] * 4)
    with pytest.raises(
        UserError, match=r"b would have nothing to train on; divide the data anew with split.given=false"
    ):
        divide(pool, Natural(), Splits(), 0)
    assert sizes(divide(pool, Natural(), Splits(given=False), 0)["b"]) == (2, 1, 1)
    with pytest.raises(UserError, match=r"no client has anything to test on: raise split.test"):
        divide(make_pool([0] * 9), Natural(), Splits(test=0), 0)


def test_by_slice_lets_groups_go() -> None:
    pool = make_pool([0] * 40, groups=[n // 20 for n in range(40)])
    whole, apart = (divide(pool, Natural(), Splits(by=by), 0)["here"] for by in ("group", "slice"))  # type: ignore[arg-type]  # a word of a few
    assert sizes(whole) == (20, 0, 20) and sizes(apart) == (24, 8, 8)
    assert len({n // 20 for n in apart.test.tolist()}) == 2


# Embedded federations


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"partition": "dirichlet"}, "tiny comes divided into clients and splits: leave partition=dirichlet out"),
        (
            {"partition.clients": 2},
            "tiny comes divided into clients and splits: leave partition.clients and partition.sm",
        ),
        ({"split.test": 0.3, "split.file": ""}, "tiny comes divided into clients and splits: leave split.test out"),
        ({"split.file": "mine.tsv"}, "tiny comes divided into clients and splits: leave split.file out"),
    ],
)
def test_a_federation_that_comes_divided(tiny: dict[str, Any], overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        Parts.build(load(tiny, overrides))
    assert str(caught.value).startswith(line)


def test_a_fraction_of_an_embedded_federation(tiny: dict[str, Any]) -> None:
    clients = Parts.build(load(tiny, {"split.fraction": 0.5})).federation.clients
    assert [sizes(index) for index in clients.values()] == [(7, 6, 8), (5, 6, 8), (3, 6, 8)]


# Files


def test_a_file_of_splits_gives_the_same_federation(tmp_path: Path) -> None:
    pool, path = Stripes().pool(), tmp_path / "my splits.tsv"
    clients = divide(pool, IID(3), Splits(), 4)
    write_splits(path, pool, clients)
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#") and len(lines) == 91
    assert lines[1] == f"client-0\ttrain\tfolder/{clients['client-0'].train[0]:04d}.png"
    again = read_splits(path, pool)
    assert again.keys() == clients.keys()
    for name, index in clients.items():
        assert all(torch.equal(index.of(part), again[name].of(part)) for part in ("train", "val", "test"))  # type: ignore[arg-type]  # a word of a few
    federation = Parts.build(load(STRIPES, {"split.file": str(path)})).federation
    assert [sizes(index) for index in federation.clients.values()] == [sizes(index) for index in clients.values()]
    reduced = divide(pool, Natural(), Splits(file=str(path), fraction=0.5), 0)
    assert [len(reduced[name].train) for name in clients] == [len(index.train) // 2 for index in clients.values()]


def test_a_file_from_elsewhere(tmp_path: Path) -> None:
    """Written by hand, on Windows, in any order, with comments, and without most samples."""
    path = tmp_path / "theirs.txt"
    path.write_bytes(
        b"\xef\xbb\xbf# from a friend\r\n\r\nB\ttest\tfolder/0003.png\r\nA\ttrain\tfolder/0002.png\r\n"
        b"A\ttest\tfolder/0001.png\r\nB\ttrain\tfolder/0000.png\r\nA\tval\tfolder/0009.png"
    )
    clients = read_splits(path, make_pool([0] * 10))
    assert {name: everything(index) for name, index in clients.items()} == {"A": [1, 2, 9], "B": [0, 3]}
    assert clients["A"].val.tolist() == [9] and clients["B"].test.tolist() == [3]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("A\ttrain\tfolder/0001.png\nA\ttrain\tfolder/0099.png\n", ", line 2: made-up has no sample 'folder/0099.png'"),
        (
            "A\ttrain\t/home/me/0001.png\n",
            ", line 1: made-up has no sample '/home/me/0001.png'; there is 'folder/0001.png'",
        ),
        (
            "# hello\nA\ttrain\tfolder/0001.png\nB\ttest\tfolder/0001.png\n",
            ", line 3: 'folder/0001.png' stands on line 2",
        ),
        ("A\ttraining\tfolder/0001.png\n", ", line 1: no split is named 'training'; did you mean 'train'?"),
        ("A train folder/0001.png\n", ", line 1: is not client, split and name, separated by tabs: 'A train fold"),
        ("A\ttrain\n", ", line 1: is not client, split and name"),
        ("\ttrain\tfolder/0001.png\n", ", line 1: is not client, split and name"),
        ("# nothing\n", " names no samples"),
    ],
)
def test_mistakes_in_a_file_are_named_by_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "splits.tsv"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_splits(path, make_pool([0] * 10))
    assert str(caught.value).startswith(f"{path}{says}")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    pool = make_pool([0] * 4)
    with pytest.raises(UserError, match=r"split.file: .* cannot be read: .*No such file"):
        read_splits(tmp_path / "none.tsv", pool)
    (tmp_path / "odd.tsv").write_bytes(b"A\ttrain\t\xff\n")
    with pytest.raises(UserError, match="cannot be read: 'utf-8' codec"):
        read_splits(tmp_path / "odd.tsv", pool)
    clients = divide(pool, Natural(), Splits(), 0)
    with pytest.raises(UserError, match="cannot be written"):
        write_splits(tmp_path / "odd.tsv" / "x.tsv", pool, clients)
    with pytest.raises(UserError, match="sample 'same' of client 'here' is there twice"):
        write_splits(tmp_path / "x.tsv", replace(pool, names=["same"] * 4), clients)
    with pytest.raises(UserError, match="is not to be told apart in a file of splits"):
        write_splits(tmp_path / "x.tsv", replace(pool, names=["a\nb", "c", "d", "e"]), clients)
    assert not (tmp_path / "x.tsv").exists()


def test_a_file_leaves_nothing_to_a_partition(tmp_path: Path) -> None:
    pool = make_pool([0] * 10)
    write_splits(tmp_path / "a.tsv", pool, divide(pool, Natural(), Splits(), 0))
    with pytest.raises(UserError, match=r"split.file says whose each sample is: leave partition=iid out"):
        divide(pool, IID(2), Splits(file=str(tmp_path / "a.tsv")), 0)


def test_the_digest_knows_what_is_in_a_file_of_splits(tmp_path: Path) -> None:
    pool, paths = Stripes().pool(), [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    for path in paths:
        write_splits(path, pool, divide(pool, IID(3), Splits(), 0))
    one, other = (load(STRIPES, {"split.file": str(path)}).digest() for path in paths)
    assert one == other
    write_splits(paths[0], pool, divide(pool, IID(3), Splits(), 1))
    assert load(STRIPES, {"split.file": str(paths[0])}).digest() != other


def test_a_file_of_splits_from_the_command_line(tmp_path: Path, draw: Callable[..., Path]) -> None:
    for number in range(20):
        site, kind = ("north", "south")[number % 2], ("cat", "dog")[number // 2 % 2]
        draw(tmp_path / "my pictures" / site / kind / f"{number}.png", seed=number)
    out = tmp_path / "splits.tsv"
    where = [str(tmp_path / "my pictures"), "--source", "image_folders"]
    found = CliRunner().invoke(
        app, ["data", "split", *where, "size=8", "partition=iid", "partition.clients=3", "-o", str(out)]
    )
    assert found.exit_code == 0 and found.output == f"{out}: 20 of 20 samples at 3 clients\n"
    assert len([line for line in out.read_text().splitlines() if line.startswith("client-")]) == 20
    config = load({"source": {"name": "image_folders", "path": where[0], "size": 8}, "network": "lenet"})
    same = federate(config.build("source"), Natural(), Splits(file=str(out)), 0)
    drawn = federate(config.build("source"), IID(3), Splits(), 0)
    assert same.division() == drawn.division()
    assert CliRunner().invoke(app, ["data", "split", "--source", "digit-sites"]).exit_code == 2
    assert CliRunner().invoke(app, ["data", "split", *where, "size=8", "partition.clients=9"]).exit_code == 2


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Run = fedfa.run(STRIPES, root=tmp_path)
    (run.folder / "done").unlink()
    assert fedfa.resume(run.folder).done, "the same data"
    (run.folder / "done").unlink()
    monkeypatch.setattr(Stripes, "shares", Shares(0.3, 0.3))
    with pytest.raises(
        UserError, match="was started with other data or splits than made-up has now: put them back, or"
    ):
        fedfa.resume(run.folder)


def test_a_run_over_simulated_clients(tmp_path: Path) -> None:
    run = fedfa.run(STRIPES, root=tmp_path, partition={"name": "iid", "clients": 9}, participation=1 / 3)
    assert len(run.metrics[-1]["clients"]) == 3 and len(run.provenance["samples"]) == 9

"""Experiments: what is checked, what an error says, and when two of them are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedfa
from fedfa import Algorithm, UserError, load
from fedfa.experiment import builtin_experiments, complete, parse_override, parse_overrides


def complaint(experiment: Any, overrides: Mapping[str, Any] | None = None) -> str:
    """The one line that a user sees."""
    with pytest.raises(UserError) as caught:
        load(experiment, overrides)
    line = str(caught.value)
    assert "\n" not in line and line
    return line


# What is wrong, in one line


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("round", 5, "unknown key 'round'; did you mean 'rounds'?"),
        ("learning_rate", 1, "unknown key 'learning_rate'; known are name, description, source,"),
        ("batchsize", 4, "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("Algorithm", "fedfa", "unknown key 'Algorithm'; did you mean 'algorithm'?"),
        ("rounds", 0, "rounds: should be greater than or equal to 1, not 0"),
        ("rounds", "many", "rounds: should be a valid integer"),
        ("rounds", 1.5, "rounds: should be a valid integer"),
        ("seed", -1, "seed: should be greater than or equal to 0, not -1"),
        ("lr", 0, "lr: should be greater than 0, not 0"),
        ("lr", float("inf"), "lr: should be a finite number, not inf"),
        ("lr", float("nan"), "lr: should be"),
        ("lr", [0.1], "lr: should be a valid number, not [0.1]"),
        ("lr_decay", 1.01, "lr_decay: should be less than or equal to 1, not 1.01"),
        ("momentum", 1, "momentum: should be less than 1, not 1"),
        ("weight_decay", float("inf"), "weight_decay: should be a finite number, not inf"),
        ("participation", 0, "participation: should be greater than 0, not 0"),
        ("participation", 1.1, "participation: should be less than or equal to 1, not 1.1"),
        ("batch_size", 0, "batch_size: should be greater than or equal to 1, not 0"),
        ("drop_last", "perhaps", "drop_last: should be a valid boolean"),
        ("weighting", "equal", "weighting: should be 'uniform' or 'samples', not 'equal'"),
        ("optimizer", "sdg", "optimizer: should be 'sgd', 'adam' or 'adamw', not 'sdg'"),
        ("optimizer_state", "keep", "optimizer_state: should be 'fresh' or 'kept', not 'keep'"),
        ("engine", "quick", "engine: should be "),
        ("device", "gpu", "device: is auto, cpu, cuda, cuda:N or mps, not 'gpu'"),
        ("name", "a/b", "name: takes letters, digits,"),
        ("name", "..\\x", "name: takes letters, digits,"),
        ("held_out", 3, "held_out: should be a valid tuple, not 3"),
        ("held_out", [3], "held_out.0: should be a valid string, not 3"),
        ("keep_checkpoints", 0, "keep_checkpoints: should be greater than or equal to 1, not 0"),
    ],
)
def test_a_wrong_key_or_value(tiny: dict[str, Any], key: str, value: Any, line: str) -> None:
    assert complaint(tiny, {key: value}).startswith(line)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"algorithm": "fedav"}, "no algorithm is named 'fedav'; did you mean 'fedavg'?"),
        ({"network": "lennet"}, "no network is named 'lennet'; did you mean 'lenet'?"),
        ({"source": "digits-site"}, "no source is named 'digits-site'; did you mean 'digit-sites'?"),
        ({"augmentation": "dus"}, "no augmentation is named 'dus'; did you mean 'dsu'?"),
        ({"algorithm": "xyzzy"}, "no algorithm is named 'xyzzy'; known are fedavg, fedavgm,"),
        ({"algorithm": 5}, "algorithm is a name or a table with a name, not 5"),
        ({"algorithm": {"p": 0.3}}, "algorithm is a name or a table with a name, not {'p': 0.3}"),
        ({"algorithm": {"name": 3}}, "algorithm is a name or a table with a name, not {'name': 3}"),
        ({"algorithm": ""}, "no algorithm is named ''; known are"),
        (
            {"algorithm": "fedfa", "algorithm.momentun": 0.9},
            "algorithm 'fedfa' has no setting 'momentun'; did you mean 'momentum'?",
        ),
        ({"algorithm.p": 0.9}, "algorithm 'fedavg' has no setting 'p'; it has none"),
        ({"algorithm": "fedfa", "algorithm.p": "often"}, "algorithm.p: should be a valid number, unable to parse"),
        (
            {"algorithm": "fedfa", "algorithm.fusion": "adaptiv"},
            "algorithm.fusion: should be 'adaptive', 'direct', 'client', 'random' or 'total', not 'adaptiv'",
        ),
        ({"algorithm.": 1}, "algorithm 'fedavg' has no setting ''; it has none"),
        ({"rounds.x": 1}, "'rounds.x': 'rounds' has no settings of its own; source, network, algorithm,"),
        ({"split": 0.2, "split.test": 0.2}, r"'split.test' is a setting of split, which is 0.2 and not a table"),
        ({"network.num_classes": 7}, "network 'tiny-net' has no setting 'num_classes'; known are dropout"),
    ],
)
def test_a_wrong_component_or_setting(tiny: dict[str, Any], overrides: dict[str, Any], line: str) -> None:
    assert complaint(tiny, overrides).startswith(line)


def test_what_must_be_said() -> None:
    assert complaint({}) == "source is missing: say source=NAME; network is missing: say network=NAME"


def test_all_mistakes_are_told_at_once(tiny: dict[str, Any]) -> None:
    line = complaint(tiny, {"rounds": 0, "lr": -1, "sed": 3})
    assert line == (
        "rounds: should be greater than or equal to 1, not 0; lr: should be greater than 0, not -1; "
        "unknown key 'sed'; did you mean 'seed'?"
    )


def test_settings_that_no_layer_takes_are_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^algorithm: p is a probability, between 0 and 1, not 1\.5$"):
        load(tiny, {"algorithm": "fedfa", "algorithm.p": 1.5})
    with pytest.raises(UserError, match=r"^algorithm: statistics='released' has no variance over clients"):
        load(tiny, {"algorithm": "fedfa-total", "algorithm.statistics": "released"})


def test_settings_without_a_default(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Needy(Algorithm):
        mu: float

    monkeypatch.setitem(fedfa.ALGORITHMS._targets, "needy", Needy)
    assert complaint(tiny, {"algorithm": "needy"}) == "algorithm 'needy' needs mu: say algorithm.mu=…"
    assert load(tiny, {"algorithm": {"name": "needy", "mu": 1}}).algorithm == {"name": "needy", "mu": 1.0}


# Files


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"rounds = = 3", "cannot be read: Invalid value (at line 1, column 10)"),
        (b"rounds = 3\nrounds = 4", "cannot be read: Cannot overwrite a value"),
        (b"description = 'caf\xe9'", "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
        (b"\x00\x01\x02", "cannot be read: Invalid statement"),
        (b"", None),
    ],
)
def test_a_broken_file(tmp_path: Path, content: bytes, says: str | None) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    line = complaint(path)
    assert line.startswith(f"{path} {says}" if says else "source is missing")


def test_a_missing_file_and_a_missing_name(tmp_path: Path) -> None:
    assert complaint(tmp_path / "mine.toml") == f"no file {tmp_path / 'mine.toml'}"
    assert complaint("digit-site") == (
        "no experiment 'digit-site'; did you mean 'digit-sites'? (or the path of a .toml file)"
    )
    assert complaint("").startswith("no experiment ''; known are digit-sites, phantom-sites")
    assert complaint("x" * 5000).startswith("no experiment 'xxx")


def test_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "mine.toml"
    folder.mkdir()
    for path in (folder, tmp_path):
        assert complaint(path) == f"{path} is a folder: an experiment is a .toml file or a built-in name"


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path, tiny: dict[str, Any]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps({**tiny, "description": "Zürich, 病院"}), encoding="utf-8")
    assert load(path).description == "Zürich, 病院"


def test_a_file_is_named_by_its_stem_unless_it_has_a_name(tmp_path: Path, tiny: dict[str, Any]) -> None:
    path = tmp_path / "my-study.v2.toml"
    path.write_text(tomli_w.dumps({key: value for key, value in tiny.items() if key != "name"}))
    assert load(path).name == "my-study.v2"
    path.write_text(tomli_w.dumps(tiny))
    assert load(path).name == "tiny"
    bare = tmp_path / "no-suffix"
    bare.write_text(tomli_w.dumps(tiny))
    assert load(str(bare)).rounds == 3


def test_the_built_in_ones_load_and_have_a_description() -> None:
    named = builtin_experiments()
    assert list(named) == ["digit-sites", "phantom-sites"]
    for name, description in named.items():
        config = load(name)
        assert config.name == name and config.description == description
        assert config.source["name"] == name and config.algorithm["name"] == "fedfa"
        assert config.title.startswith(f"{name}-fedfa-seed0-")


# Overrides


def test_overrides_go_on_top(tiny: dict[str, Any]) -> None:
    config = load(tiny, {"rounds": 7, "algorithm": "fedfa", "algorithm.p": 0.25, "network.dropout": 0})
    assert config.rounds == 7
    assert config.algorithm == {
        "name": "fedfa", "p": 0.25, "momentum": 0.99, "fusion": "adaptive", "statistics": "paper", "eps": 1e-6,
    }  # fmt: skip
    assert config.network == {"name": "tiny-net", "dropout": 0.0}
    assert tiny["algorithm"] == "fedavg" and tiny["rounds"] == 3  # what was given is left as it was


def test_the_order_of_overrides_does_not_matter(tiny: dict[str, Any]) -> None:
    late = load(tiny, {"algorithm": "fedfa", "algorithm.p": 0.25})
    early = load(tiny, {"algorithm.p": 0.25, "algorithm": "fedfa"})
    assert early == late and early.algorithm["p"] == 0.25


def test_another_algorithm_drops_the_old_one_s_settings(tiny: dict[str, Any]) -> None:
    first = load(tiny, {"algorithm": {"name": "fedfa", "p": 0.25}})
    assert load(first, {"algorithm": "fedavg"}).algorithm == {"name": "fedavg"}
    assert load(first, {"algorithm": "fedfa-r"}).algorithm["p"] == 0.5
    assert load(first, {"algorithm.momentum": 0.9}).algorithm["p"] == 0.25
    assert first.algorithm["p"] == 0.25


def test_one_client_held_out_needs_no_list(tiny: dict[str, Any]) -> None:
    assert load(tiny, {"held_out": "north"}).held_out == ("north",)
    assert load(tiny, {"held_out": ["north", "west"]}).held_out == ("north", "west")
    assert load(tiny).held_out == ()
    assert load(tiny, dict([parse_override("held_out=[west, north]")])).held_out == ("north", "west")


def test_the_order_of_held_out_clients_is_not_in_the_name(tiny: dict[str, Any]) -> None:
    digests = {load(tiny, {"held_out": names}).digest() for names in (["a", "b"], ["b", "a"], ["a", "b", "a"])}
    assert len(digests) == 1


def test_a_file_name_with_spaces(tmp_path: Path) -> None:
    path = tmp_path / "my study (2).toml"
    path.write_text('source = "tiny"\nnetwork = "tiny-net"\n')
    assert load(path).name == "my-study-2"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rounds=5", ("rounds", 5)),
        ("seed=-3", ("seed", -3)),
        ("lr=0.01", ("lr", 0.01)),
        ("lr=1e-2", ("lr", 0.01)),
        ("lr=5E+3", ("lr", 5000.0)),
        ("drop_last=true", ("drop_last", True)),
        ("drop_last=false", ("drop_last", False)),
        ("drop_last=True", ("drop_last", "True")),
        ("algorithm=fedfa", ("algorithm", "fedfa")),
        ('algorithm="fedfa"', ("algorithm", "fedfa")),
        ("algorithm=fedfa-r", ("algorithm", "fedfa-r")),
        ("algorithm.p=0.3", ("algorithm.p", 0.3)),
        ("network.stages=[1, 3]", ("network.stages", [1, 3])),
        ("held_out=['a', 'b c']", ("held_out", ["a", "b c"])),
        ("algorithm={name = 'fedfa', p = 0.3}", ("algorithm", {"name": "fedfa", "p": 0.3})),
        (" rounds = 5 ", ("rounds", 5)),
        ("description=two words", ("description", "two words")),
        ("description=a=b", ("description", "a=b")),
        ("description=", ("description", "")),
        ("description= it's ", ("description", "it's")),
        ("description=Zürich", ("description", "Zürich")),
    ],
)
def test_overrides_of_the_command_line(text: str, wanted: tuple[str, Any]) -> None:
    key, value = parse_override(text)
    assert (key, value) == wanted and type(value) is type(wanted[1])


@pytest.mark.parametrize("text", ["rounds", "rounds:5", "", "=5", " =5", "--rounds"])
def test_what_is_not_key_equals_value(text: str) -> None:
    with pytest.raises(UserError, match=r"is not key=value, such as rounds=5 or algorithm=fedfa$"):
        parse_override(text)


def test_the_last_of_two_overrides_counts() -> None:
    assert parse_overrides(["rounds=1", "lr=2", "rounds=3"]) == {"rounds": 3, "lr": 2}


values = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text()),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(values)
def test_any_value_written_as_toml_is_read_back(value: Any) -> None:
    text = tomli_w.dumps({"key": value}).rstrip("\n")
    assert parse_override(text) == ("key", value)


@given(st.text(), st.text())
def test_any_text_is_an_override_or_a_user_error(key: str, value: str) -> None:
    try:
        found, _ = parse_override(f"{key}={value}")
    except UserError:
        assert not key.partition("=")[0].strip()
    else:
        assert found == key.partition("=")[0].strip()


# The same experiment


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"algorithm": "fedfa", "algorithm.p": 0.3, "held_out": ["north", "west"]},
        {
            "source.names": ["a.b", "c/d", "Zürich"],
            "source.train": [5, 6, 7],
            "description": 'with "quotes" and\nlines',
        },
        {"network": "lenet", "network.stages": [2], "lr": 1e-7, "drop_last": True, "participation": 1 / 3},
        {"network": "lenet", "source": "digit-sites"},  # settings that are None, which TOML has no word for
    ],
)
def test_what_is_shown_is_the_same_experiment(tmp_path: Path, tiny: dict[str, Any], overrides: dict[str, Any]) -> None:
    config = load(tiny, overrides)
    path = tmp_path / "other-name.toml"
    path.write_text(config.toml(), encoding="utf-8")
    again = load(path)
    assert again.model_dump(mode="json") == config.model_dump(mode="json")
    assert again.digest() == config.digest() and again.title == config.title and again.toml() == config.toml()


def digest(tiny: dict[str, Any], **overrides: Any) -> str:
    return load(tiny, overrides).digest()


def test_the_digest_is_eight_hex_digits_and_part_of_the_title(tiny: dict[str, Any]) -> None:
    config = load(tiny, {"seed": 3})
    assert len(config.digest()) == 8 and int(config.digest(), 16) >= 0
    assert config.title == f"tiny-fedavg-seed3-{config.digest()}"


@pytest.mark.parametrize(
    "same",
    [
        {"lr": 0.05},
        {"momentum": 0},
        {"weighting": "uniform"},
        {"algorithm": {"name": "fedavg"}},
        {"augmentation": "none"},
        {"network": {"name": "tiny-net", "dropout": 0.2}},
        {"source.val": 6},
        {"rounds": "3"},
        {"held_out": []},
        {"description": "another"},
        {"checkpoint_every": 1},
        {"keep_checkpoints": 9},
    ],
)
def test_a_default_said_aloud_or_a_cosmetic_key_gives_the_same_digest(
    tiny: dict[str, Any], same: dict[str, Any]
) -> None:
    assert digest(tiny, **same) == digest(tiny)


def test_anything_else_gives_another_digest(tiny: dict[str, Any]) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"lr": 0.051}, {"seed": 1}, {"rounds": 4}, {"name": "other"}, {"held_out": "north"}, {"momentum": 0.9},
        {"algorithm": "fedfa"}, {"algorithm": "fedfa", "algorithm.p": 0.4}, {"algorithm": "fedfa-r"},
        {"network.dropout": 0.1}, {"source.val": 5}, {"augmentation": "dsu"}, {"batch_size": 5}, {"threads": 2},
        {"participation": 0.5}, {"weighting": "samples"}, {"epochs": 2}, {"drop_last": True}, {"optimizer": "adam"},
        {"lr_decay": 0.9}, {"weight_decay": 0.1}, {"optimizer_state": "kept"}, {"evaluate_every": 2},
    ]  # fmt: skip
    assert len({digest(tiny, **change) for change in changes}) == len(changes)


def test_the_digest_does_not_depend_on_how_the_experiment_was_put_together(tiny: dict[str, Any]) -> None:
    config = load(tiny, {"algorithm": "fedfa", "held_out": "north"})
    backwards = dict(reversed(list(config.model_dump().items())))
    assert config.digest() == load(backwards).digest() == load(load(config)).digest()


def test_an_experiment_does_not_change(tiny: dict[str, Any]) -> None:
    config = load(tiny)
    with pytest.raises(ValueError, match="frozen"):
        config.rounds = 5


# Components of one's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Register a component for one test."""

    def own(name: str, target: Any) -> None:
        registry = fedfa.NETWORKS
        monkeypatch.setattr(registry, "_targets", {**registry._targets, name: target})
        monkeypatch.setattr(registry, "_lines", {**registry.lines, name: "for a test"})

    return own


def test_a_function_is_a_component_too(tiny: dict[str, Any], own: Callable[[str, Any], None]) -> None:
    def wide(num_classes: int, in_channels: int, augment: Any, width: int = 8, bias=True, **rest: Any) -> nn.Module:
        return nn.Linear(width, num_classes, bias=bias)

    own("wide", wide)
    config = load(tiny, {"network": "wide", "network.width": "16"})
    assert config.network == {"name": "wide", "width": 16, "bias": True}
    model = config.build("network", num_classes=3, in_channels=1, augment=None)
    assert tuple(model.weight.shape) == (3, 16)
    assert complaint(tiny, {"network": "wide", "network.with": 3}).endswith("did you mean 'width'?")


def test_a_component_that_refuses_its_settings(tiny: dict[str, Any], own: Callable[[str, Any], None]) -> None:
    @dataclass
    class Picky:
        width: int = 8

        def __post_init__(self) -> None:
            raise ValueError("too wide")

    own("picky", Picky)
    with pytest.raises(UserError, match=r"^network: too wide$"):
        load(tiny, {"network": "picky"}).build("network")


def test_complete_fills_in_every_setting() -> None:
    assert complete("augmentation", "dsu") == {"name": "dsu", "p": 0.5, "eps": 1e-6}
    assert complete("augmentation", {"name": "dsu", "p": "0.25"}) == {"name": "dsu", "p": 0.25, "eps": 1e-6}
    assert complete("algorithm", "fedavg") == {"name": "fedavg"}

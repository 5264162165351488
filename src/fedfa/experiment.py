"""Experiments: the validated config of a run, from a TOML file or a built-in name and `key=value` overrides."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from fedfa.algorithms import ALGORITHMS
from fedfa.errors import UserError
from fedfa.registries import AUGMENTATIONS, NETWORKS, PARTITIONS, SOURCES, TRANSFORMS
from fedfa.registry import Registry, nearest

REGISTRIES: dict[str, Registry[Any]] = {
    "source": SOURCES,
    "network": NETWORKS,
    "algorithm": ALGORITHMS,
    "augmentation": AUGMENTATIONS,
    "partition": PARTITIONS,
}
COMPONENTS: dict[str, Registry[Any]] = REGISTRIES | {"transform": TRANSFORMS}
"""Those of which an experiment has one, and those of which it has a list."""
GIVEN = ("num_classes", "in_channels", "augment")
"""Arguments of a network that the federation and the algorithm decide."""
COSMETIC = {"description", "checkpoint_every", "keep_checkpoints", "lanes", "processes", "trackers"}
"""Keys that do not change a run's numbers, and so not its name."""
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""Where a run's numbers can go besides its folder; :mod:`fedfa.trackers` has them."""


MOST_THREADS = 1024
"""With a hundred thousand the process ends without a word."""


class Experiment(BaseModel):
    """Everything that decides a run's numbers. `source`, `partition`, `network`, `algorithm` and `augmentation` are a
    name, or a table with a name and settings of that component; `split` is a table of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = "experiment"
    description: str = ""
    source: dict[str, Any]
    network: dict[str, Any]
    algorithm: dict[str, Any] = Field({"name": "fedavg"}, validate_default=True)
    augmentation: dict[str, Any] = Field({"name": "none"}, validate_default=True)
    partition: dict[str, Any] = Field({"name": "natural"}, validate_default=True)
    split: dict[str, Any] = Field({}, validate_default=True)
    transforms: tuple[dict[str, Any], ...] = ()
    rounds: int = Field(100, ge=1)
    seed: int = Field(0, ge=0)
    participation: float = Field(1.0, gt=0, le=1)
    weighting: Literal["uniform", "samples"] = "uniform"
    held_out: tuple[str, ...] = ()
    epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    drop_last: bool = False
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.01, gt=0)
    lr_decay: float = Field(1.0, gt=0, le=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.0, ge=0)
    optimizer_state: Literal["fresh", "kept"] = "fresh"
    dice: Literal["foreground", "released"] = "foreground"
    evaluate_every: int = Field(1, ge=1)
    evaluate_last: int = Field(1, ge=1)
    engine: Literal["auto", "sequential", "captured"] = "auto"
    lanes: int = Field(0, ge=0)
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    device: str = "auto"
    threads: int = Field(0, ge=0, le=MOST_THREADS)
    processes: int = Field(0, ge=0)
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    trackers: tuple[str, ...] = ("tensorboard",)

    @field_validator("source", "network", "algorithm", "augmentation", "partition", mode="before")
    @classmethod
    def _component(cls, value: Any, info: Any) -> dict[str, Any]:
        return complete(info.field_name, value)

    @field_validator("split", mode="before")
    @classmethod
    def _split(cls, value: Any) -> dict[str, Any]:
        from fedfa.data.splits import Splits  # which needs torch, and listing names should not

        if not isinstance(value, Mapping):
            raise UserError(f"split is a table of settings, such as split.test=0.2, not {value!r}")
        try:
            return asdict(Splits(**_checked("split", Splits, value)))
        except ValueError as error:
            raise UserError(f"split: {error}") from error

    @field_validator("transforms", mode="before")
    @classmethod
    def _components(cls, value: Any) -> tuple[dict[str, Any], ...]:
        listed = value if isinstance(value, (list, tuple)) else (value,) * bool(value)
        return tuple(complete("transform", item) for item in listed)

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]+", value):
            raise ValueError("takes letters, digits, '.', '_' and '-', since folders are named by it")
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", value):
            raise ValueError("is auto, cpu, cuda, cuda:N or mps")
        return value

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in TRACKERS:
                raise UserError(f"no tracker {name!r}; {nearest(name, TRACKERS)}")
        return names

    @field_validator("held_out", "trackers", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        names = (value,) * bool(value) if isinstance(value, str) else value
        plain = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        return tuple(sorted(set(names))) if plain else names  # the order of names says nothing

    def build(self, component: str, **given: Any) -> Any:
        """The component of that kind, made with its settings."""
        return _make(component, getattr(self, component), **given)

    def build_transforms(self) -> list[Any]:
        """The transforms, in their order."""
        return [_make("transform", table) for table in self.transforms]

    def digest(self) -> str:
        """Eight hex digits that name these settings. A file of splits counts by what is in it, wherever it lies."""
        plain = self.model_dump(mode="json", exclude=COSMETIC)
        plain["split"]["file"] = self.split_file()
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]

    def split_file(self) -> str:
        """The file of splits by what is in it; by its name, where it is not there."""
        file: str = self.split["file"]
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if os.path.isfile(file) else file

    @property
    def title(self) -> str:
        """What a run of this experiment is called: readable, and different for different settings."""
        return f"{self.name}-{self.algorithm['name']}-seed{self.seed}-{self.digest()}"

    def toml(self) -> str:
        """The whole config, defaults included, as TOML."""
        import tomli_w

        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def builtin_experiments() -> dict[str, str]:
    """Names of the experiments that come with the package, each with its description."""
    folder = files("fedfa") / "builtin"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".toml"))
    texts = {name: tomllib.loads((folder / name).read_text()) for name in names}
    return {name.removesuffix(".toml"): text["description"] for name, text in texts.items()}


def load(
    experiment: str | Path | Mapping[str, Any] | Experiment, overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """An experiment from a built-in name, a TOML file, a mapping or another experiment, with overrides on top.

    Keys of overrides may be dotted: ``{"algorithm.p": 0.3}``. Those come last, wherever they stand: a new algorithm
    does not undo its own settings.
    """
    config = _read(experiment)
    for key, value in sorted((overrides or {}).items(), key=lambda item: "." in item[0]):
        _set(config, key, value)
    try:
        checked = Experiment(**config)
    except ValidationError as error:
        raise UserError(_one_line(error)) from None
    for component in ("algorithm", "augmentation", "partition"):
        checked.build(component)  # which refuses values that make no sense
    checked.build_transforms()
    return checked


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config with what it does not say, since that setting was not there yet when it ran."""
    try:
        return tomllib.loads(load(config).toml())
    except UserError:  # of an algorithm that is not known here, say
        return dict(config)


def parse_override(text: str) -> tuple[str, Any]:
    """``key=value`` of the command line: the value is read as TOML, or as a string where it is not; the names in a
    list need no quotes."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not key=value, such as rounds=5 or algorithm=fedfa")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
        if parsed.startswith("[") and parsed.endswith("]"):
            parsed = [name.strip() for name in parsed[1:-1].split(",") if name.strip()]
    return key.strip(), parsed


def complete(component: str, value: Any) -> dict[str, Any]:
    """A component's table with every setting in it, checked: ``"fedfa"`` becomes ``{"name": "fedfa", "p": 0.5, …}``."""
    table = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
    if table is None or not isinstance(table.get("name"), str):
        raise UserError(f"{component} is a name or a table with a name, not {value!r}")
    name = table.pop("name")
    target = COMPONENTS[component].find(name)
    return {"name": name, **_checked(component, target, table, name)}


def _checked(component: str, target: Any, table: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Every setting of `target`: as in `table`, or its default."""
    known, title = _settings(target), f"{component} {name!r}" if name else component
    checked = {key: default for key, (_, default) in known.items()}
    for key, setting in table.items():
        if key not in known:
            hint = nearest(key, known) if known else "it has none"
            raise UserError(f"{title} has no setting {key!r}; {hint}")
        try:
            checked[key] = _adapter(known[key][0]).validate_python(setting)
        except ValidationError as error:
            raise UserError(f"{component}.{key}: {_complaint(error.errors()[0])}") from None
    for key, value in checked.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"{title} needs {key}: say {component}.{key}=…")
    return checked


def _make(component: str, table: Mapping[str, Any], **given: Any) -> Any:
    settings = dict(table)
    target = COMPONENTS[component][settings.pop("name")]
    try:
        return target(**settings, **given)
    except ValueError as error:
        raise UserError(f"{component}: {error}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _settings(target: Any) -> dict[str, tuple[Any, Any]]:
    """Settings of a component: type and default of every argument that is not given by us."""
    described = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(described)
    parameters = inspect.signature(target).parameters.values()
    return {
        p.name: (hints.get(p.name, Any), p.default)
        for p in parameters
        if p.name not in GIVEN and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _read(experiment: str | Path | Mapping[str, Any] | Experiment) -> dict[str, Any]:
    if isinstance(experiment, Experiment):
        return experiment.model_dump()
    if isinstance(experiment, Mapping):
        return dict(experiment)
    path = Path(experiment)
    if str(experiment) and os.path.isdir(path) and str(experiment) not in builtin_experiments():
        raise UserError(f"{path} is a folder: an experiment is a .toml file or a built-in name")
    if path.suffix != ".toml" and not os.path.isfile(path):  # Path.is_file raises where a name is too long
        built_in = builtin_experiments()
        if str(experiment) not in built_in:
            raise UserError(
                f"no experiment {str(experiment)!r}; {nearest(str(experiment), built_in)} (or the path of a .toml file)"
            )
        text = (files("fedfa") / "builtin" / f"{experiment}.toml").read_text()
        return {"name": str(experiment), **tomllib.loads(text)}
    try:
        return {
            "name": re.sub(r"[^\w.-]+", "-", path.stem).strip("-") or "experiment",
            **tomllib.loads(path.read_text("utf-8")),
        }
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    first, dot, rest = key.partition(".")
    if not dot:
        config[key] = value
        return
    default = Experiment.model_fields[first].default if first in Experiment.model_fields else {}
    table = config.get(first, default)
    tables = (*REGISTRIES, "split")
    if first not in tables:
        raise UserError(f"{key!r}: {first!r} has no settings of its own; {', '.join(tables)} have")
    if first in config and not isinstance(table, str | Mapping):
        raise UserError(f"{key!r} is a setting of {first}, which is {table!r} and not a table: leave one of them out")
    table = {"name": table} if isinstance(table, str) else dict(table) if isinstance(table, Mapping) else {}
    table[rest] = value
    config[first] = table


def _one_line(error: ValidationError) -> str:
    return "; ".join(_place(problem) + _complaint(problem) for problem in error.errors())


def _place(problem: Any) -> str:
    return "" if problem["type"] in ("extra_forbidden", "missing") else f"{'.'.join(map(str, problem['loc']))}: "


def _complaint(problem: Any) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(key, Experiment.model_fields)}"
    if problem["type"] == "missing":
        return f"{key} is missing: say {key}=NAME"
    message = problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{message}, not {problem['input']!r}"


def _without_none(value: Any) -> Any:
    """TOML has no null: a key without a value is left out, and its default is None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    return dict(parse_override(text) for text in texts)

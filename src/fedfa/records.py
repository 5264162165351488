"""The shapes of what runs and summaries hold. A crash, a disk or a hand may have changed a file: what is wrong with it
is told of where it is read, and not found in the middle of a page."""

from __future__ import annotations

from functools import cache
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypeAliasType, TypedDict  # pydantic asks for these before Python 3.12

AS_WRITTEN = ConfigDict(strict=True, allow_inf_nan=False)
"""No text that reads as a number, no number that is none. What a shape does not name may be anything."""

Plain = TypeAliasType("Plain", "str | bool | int | float | list[Plain] | dict[str, Plain]")
"""What a config is made of: what TOML and JSON have in common."""
Score = float | None
"""None where a loss or a metric was not finite."""
Column = float | list[Score] | None
"""A number for every round; one for all of them where they are the same."""


@with_config(AS_WRITTEN)
class Component(TypedDict):
    """A component of an experiment, with its settings."""

    name: str


@with_config(AS_WRITTEN)
class Config(TypedDict):
    """``experiment.toml``: what every run's has. Which other settings there are has changed, and will."""

    name: str
    seed: int
    rounds: int
    held_out: NotRequired[list[str]]
    source: Component
    network: Component
    algorithm: Component
    augmentation: NotRequired[Component]


@with_config(AS_WRITTEN)
class Provenance(TypedDict):
    """``provenance.json``: of what is in there, that which is computed with or shown."""

    metric: str
    samples: NotRequired[dict[str, list[int]]]
    notices: NotRequired[list[str]]
    parameters: NotRequired[int]
    memory: NotRequired[int | None]
    training_memory: NotRequired[int | None]
    beside: NotRequired[int]
    data: NotRequired[str | None]
    classes: NotRequired[int | None]


@with_config(AS_WRITTEN)
class Scores(TypedDict):
    """Metrics on one split, shares of 1."""

    mean: float
    unseen: NotRequired[Score]
    gap: NotRequired[Score]
    clients: dict[str, Score]


@with_config(AS_WRITTEN)
class Line(TypedDict):
    """A line of ``metrics.jsonl``: a round."""

    round: int
    loss: Score
    clients: list[str]
    refused: NotRequired[dict[str, str]]
    seconds: NotRequired[float]
    bytes_up: NotRequired[float]
    bytes_down: NotRequired[float]
    val: NotRequired[Scores]
    test: NotRequired[Scores]


Columns = TypedDict(
    "Columns",
    {
        "round": list[int],
        "trained": int | list[int],
        "loss": Column,
        "seconds": Column,
        "bytes_up": Column,
        "bytes_down": Column,
        "val.mean": Column,
        "val.unseen": Column,
        "val.gap": Column,
        "test.mean": Column,
        "test.unseen": Column,
        "test.gap": Column,
    },
    total=False,
)
"""A summary's rounds."""
with_config(AS_WRITTEN)(Columns)


@with_config(AS_WRITTEN)
class SummaryFile(TypedDict):
    """The file of a summary."""

    name: str
    done: bool
    config: Config
    provenance: Provenance
    clients: dict[str, dict[str, Score]]
    refused: dict[str, dict[str, str]]
    rounds: Columns


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape, config=AS_WRITTEN) if shape is Plain else TypeAdapter(shape)


def check(found: Any, shape: Any, where: str = "") -> None:
    """Raise ValueError, in one line, where what was found has another shape."""
    try:
        _adapter(shape).validate_python(found)
    except ValidationError as error:
        raise ValueError(f"{where} {first_problem(error)}".lstrip()) from None


def check_config(found: Any, where: str = "") -> None:
    """Raise ValueError where a config could not be a run's."""
    check(found, Config, where)
    try:
        check(found, Plain)
    except ValueError:
        raise ValueError(f"{where} has a setting that is no text, finite number, list or table".lstrip()) from None


def first_problem(error: ValidationError) -> str:
    """The first of what pydantic found: where, and what."""
    problem = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(part for part in (".".join(map(str, problem["loc"])), problem["msg"]) if part)

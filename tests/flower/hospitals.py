"""A federation over a grid in this process: real ServerApp, real ClientApp, real messages, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message

import fedfa
from fedfa import Run
from fedfa.flower import client_app, server_app
from fedfa.flower.local import LocalGrid
from fedfa.flower.settings import Settings
from fedfa.flower.view import Operator

SITES = ("north", "south", "west")


class Quiet(Operator):
    """An operator who writes everything down."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def noticed(self, line: str) -> None:
        super().noticed(line)
        self.lines.append(line)


class Tampered(LocalGrid):
    """A grid on which a test may change a site's reply before the server sees it, or send something else."""

    def __init__(self, *given: Any, tamper: Callable[[Message, Message], Message] | None = None) -> None:
        super().__init__(*given)
        self.tamper = tamper
        self.passed: list[Message] = []

    def answer(self, message: Message) -> Message:
        self.passed.append(message)
        reply = super().answer(message)
        return reply if self.tamper is None else self.tamper(message, reply)


def node(name: str, folder: Path, **own: Any) -> dict[str, Any]:
    return {"name": name, "folder": str(folder / "sites" / name), **own}


def grid_of(folder: Path, sites: tuple[str, ...] = SITES, **options: Any) -> Tampered:
    nodes = {number: node(name, folder) for number, name in enumerate(sites, start=1)}
    return Tampered(client_app.app, nodes, **options)


def settings(folder: Path, experiment: Mapping[str, Any], **given: Any) -> Settings:
    config = fedfa.load(dict(experiment))
    sites = given.pop("sites", SITES)
    run = {"experiment": config.toml(), "sites": ",".join(sites), "out": str(folder / "flower"), "wait": 5, **given}
    return Settings.of(run)


def federate(folder: Path, experiment: Mapping[str, Any], grid: LocalGrid | None = None, **given: Any) -> Run:
    """Play an experiment over the grid; the run's folder is made in `folder`."""
    return server_app.play(grid or grid_of(folder), settings(folder, experiment, **given), Quiet())

"""What a site says of itself (its node config) and what a run's app says (its run config). No torch in here."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfa.errors import UserError
from fedfa.registry import nearest

if TYPE_CHECKING:
    from fedfa.experiment import Experiment

NAME = re.compile(r"\w[\w.-]{0,99}")
SITE_KEYS = ("name", "superlink", "port", "source", "path", "client", "folder", "device", "worker", "agreed")


@dataclass(frozen=True)
class SiteSettings:
    """A site, as its node config describes it. Only these decide what is read from its disk, never the server."""

    name: str
    superlink: str = ""
    """Where `fedfa flower site` connects: host:port."""
    port: str = ""
    """Of Flower's own service at 127.0.0.1, by which a SuperNode and its ClientApps talk; any free one by default."""
    source: str = ""
    """A source that `fedfa list` names; the experiment's if nothing is said."""
    path: str = ""
    """The folder that the source reads."""
    client: str = ""
    """Which of the source's clients this site is, if not the one of its name and not the only one."""
    folder: str = ""
    """Where the site keeps its private state and its audit log."""
    device: str = ""
    """The experiment's if nothing is said."""
    worker: str = ""
    """The socket of a worker that holds torch and the data; without one, every message starts from nothing."""
    agreed: str = ""
    """An experiment's file: any other experiment is refused."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the source, `settings.KEY`."""

    @classmethod
    def of(cls, node: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> SiteSettings:
        """From a node config. In Flower's simulation, which has none, sites are the run's by their numbers."""
        if "name" not in node and "partition-id" in node:
            return cls._simulated(int(node["partition-id"]), Settings.of(run or {}))
        known = {key: value for key, value in node.items() if key in SITE_KEYS}
        own = {key.removeprefix("settings."): value for key, value in node.items() if key.startswith("settings.")}
        for key in node:
            if key not in SITE_KEYS and not key.startswith("settings."):
                raise UserError(f"node config: unknown key {key!r}; {nearest(key, SITE_KEYS)}")
        if not NAME.fullmatch(str(known.get("name", ""))):
            raise UserError("node config: a site needs a name of letters, digits, '.', '_' and '-': say name=\"…\"")
        plain = {key: str(value) for key, value in known.items()}
        return cls(**plain, own=own)

    @classmethod
    def _simulated(cls, number: int, settings: Settings) -> SiteSettings:
        if number >= len(settings.sites):
            raise UserError(f"the run names {len(settings.sites)} sites, and this would be number {number + 1}")
        name = settings.sites[number]
        return cls(name, folder=str(Path(settings.out).expanduser() / "sites" / name))

    @property
    def place(self) -> Path:
        return Path(self.folder or f"~/.fedfa/sites/{self.name}").expanduser()

    def experiment(self, text: str) -> Experiment:
        """The server's experiment as this site runs it: with its own data, wherever the server would look."""
        from fedfa.experiment import load
        from fedfa.registries import SOURCES

        asked = tomllib.loads(text)
        if self.agreed and load(self.agreed).digest() != load(asked).digest():
            raise UserError(f"the server's experiment is not the one agreed on, {self.agreed}")
        given = asked.get("source")
        table = {"name": given} if isinstance(given, str) else dict(given or {})
        source = self.source or str(table.get("name"))
        if source != table.get("name"):
            table = {"name": source}
        table.pop("path", None)
        if "path" in inspect.signature(SOURCES.find(source)).parameters:
            table["path"] = self.path
        changes: dict[str, Any] = {"source": {**table, **self.own}, "split.file": ""}
        if self.device:
            changes["device"] = self.device
        return load(asked, changes)


RUN_DEFAULTS: dict[str, Any] = {
    "experiment": "",
    "overrides": "",
    "sites": "",
    "min-sites": 2,
    "wait": 600,
    "round-timeout": 3600,
    "out": "runs",
}


@dataclass(frozen=True)
class Settings:
    """A run's app, as its run config describes it."""

    experiment: str
    """A built-in name, or an experiment as TOML."""
    overrides: str
    """Changes to it, as on the command line: rounds=5 algorithm=fedfa."""
    sites: tuple[str, ...]
    min_sites: int
    """No round starts with fewer sites than these."""
    wait: float
    """Seconds to wait for sites: for all of them at the start, for as many as are needed later."""
    round_timeout: float
    """Seconds that a site has for its answer."""
    out: str
    """The folder that run folders are made in."""

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Settings:
        for key in run:
            if key not in RUN_DEFAULTS:
                raise UserError(f"run config: unknown key {key!r}; {nearest(key, RUN_DEFAULTS)}")
        given = {**RUN_DEFAULTS, **run}
        sites = tuple(sorted({name.strip() for name in str(given["sites"]).split(",") if name.strip()}))
        if not sites or not all(NAME.fullmatch(name) for name in sites):
            raise UserError('run config: sites are names, such as sites = "north, south"')
        try:
            numbers = {key: float(given[key]) for key in ("min-sites", "wait", "round-timeout")}
        except (TypeError, ValueError):
            raise UserError("run config: min-sites, wait and round-timeout are numbers") from None
        if not 1 <= numbers["min-sites"] <= len(sites):
            raise UserError(f"run config: min-sites is between 1 and {len(sites)}, the number of sites")
        if numbers["wait"] < 0 or numbers["round-timeout"] <= 0:
            raise UserError("run config: wait and round-timeout are seconds, above 0")
        return cls(
            experiment=str(given["experiment"]),
            overrides=str(given["overrides"]),
            sites=sites,
            min_sites=int(numbers["min-sites"]),
            wait=numbers["wait"],
            round_timeout=numbers["round-timeout"],
            out=str(given["out"]),
        )

    def load(self) -> Experiment:
        """The experiment, checked. A checkpoint is written after every round: sites keep the state of two."""
        from fedfa.experiment import load, parse_overrides

        if not self.experiment:
            raise UserError('run config: there is no experiment: say experiment = "NAME", or its TOML')
        try:
            config = tomllib.loads(self.experiment) if "=" in self.experiment else self.experiment
            changes = parse_overrides(shlex.split(self.overrides))
        except (tomllib.TOMLDecodeError, ValueError) as error:
            raise UserError(f"run config: the experiment or its overrides cannot be read: {error}") from None
        return load(config, {**changes, "checkpoint_every": 1})

"""`fedfa flower up`: a whole federation on this machine, with TLS and keys as between machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tomli_w

from fedfa.errors import UserError
from fedfa.experiment import Experiment
from fedfa.flower.app_folder import write_app
from fedfa.flower.keys import make_keys
from fedfa.flower.processes import LocalFederation, free_port
from fedfa.registry import nearest
from fedfa.simulate import build_federation


def up(folder: Path, config: Experiment, sites: str, port: int) -> Iterator[str]:
    """Make keys and an app in a new folder, start a server and sites, and say what to do next."""
    federation = LocalFederation(folder)
    if federation.processes:
        raise UserError(f"{folder} is up already: fedfa flower down {folder}")
    fresh = not federation.server.exists()
    if fresh:
        names = _clients(config, sites)
        make_keys(federation.folder / "keys", names, "127.0.0.1", port or free_port())
        write_app(federation.folder / "app", config, names, out=str(federation.folder / "runs"))
        for name in names:
            _point(federation.folder / "keys" / "sites" / name / "site.toml", config)
        yield f"keys, certificates and an app are in {folder}"
    names = sorted(place.name for place in (federation.folder / "keys" / "sites").iterdir())
    try:
        federation.start_server()
        yield f"a server listens at 127.0.0.1:{federation.port}"
        for name in names:
            if fresh:
                federation.register(name)
            federation.start_site(name)
        for name in names:
            federation.wait_for_site(name)
    except BaseException:
        federation.down()
        raise
    yield f"sites {', '.join(names)} are up; logs are in {folder / 'logs'}"
    yield f"run:    fedfa flower run {folder}"
    yield f"watch:  fedfa flower status {folder / 'runs'}/* --watch"
    yield f"end:    fedfa flower down {folder}"


def _clients(config: Experiment, sites: str) -> list[str]:
    """Names of the source's clients: those asked for, or so many of them."""
    known = list(build_federation(config).clients)
    if sites.isdecimal():
        if not 1 <= int(sites) <= len(known):
            raise UserError(f"--sites: {config.source['name']} has {len(known)} clients, not {sites}")
        return sorted(known[: int(sites)])
    names = [name.strip() for name in sites.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"--sites: {config.source['name']} has no client {name!r}; {nearest(name, known)}")
    return names


def _point(site: Path, config: Experiment) -> None:
    """Let a site read what the experiment reads on this machine, whatever its folder."""
    path = config.source.get("path")
    if path:
        site.write_text(
            site.read_text().replace("# path", tomli_w.dumps({"path": str(Path(path).absolute())}) + "# path")
        )

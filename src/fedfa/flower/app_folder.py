"""The folder that `flwr run` takes: a config, and no code besides this package's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tomli_w

from fedfa.errors import UserError
from fedfa.experiment import Experiment
from fedfa.flower.settings import RUN_DEFAULTS, Settings

README = """\
# {name}

A run of `{algorithm}` on `{source}` over the sites {sites}, written by `fedfa flower new`.

    flwr run {folder} --stream                                        # start it, or go on with it
    flwr run {folder} --stream -c 'overrides="rounds=5 lr=0.01"'      # with changes: another run
    fedfa flower status {out}/{title}         # who is in, how far it is, what failed

`pyproject.toml` holds the whole experiment and who takes part. `min-sites`: no round starts with fewer. `wait`: seconds
to wait for sites before the run stops. `round-timeout`: seconds that a site has to answer. `out`: where run folders go,
from where the SuperLink was started.
"""


def write_app(folder: Path, config: Experiment, sites: Sequence[str], **settings: str | int | float) -> None:
    """Write an app that runs an experiment over these sites."""
    run = {**RUN_DEFAULTS, "experiment": config.toml(), "sites": ", ".join(sites), **settings}
    run["min-sites"] = min(int(run["min-sites"]), len(sites))
    checked = Settings.of(run)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    project = {
        "project": {
            "name": config.name.lower().replace(".", "-"),
            "version": "1.0.0",
            "description": config.description or f"{config.algorithm['name']} on {config.source['name']}",
            "license": "Apache-2.0",
            "dependencies": ["fedfa[flower]"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedfa",
                    "components": {
                        "serverapp": "fedfa.flower.server_app:app",
                        "clientapp": "fedfa.flower.client_app:app",
                    },
                    "config": run,
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project, multiline_strings=True))
    text = README.format(
        name=config.name,
        algorithm=config.algorithm["name"],
        source=config.source["name"],
        sites=", ".join(checked.sites),
        folder=folder,
        out=checked.out,
        title=config.title,
    )
    (folder / "README.md").write_text(text)

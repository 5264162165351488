"""The ServerApp: a run of any experiment over the sites that its config names. `flwr run` starts it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedfa.flower.settings import Settings

if TYPE_CHECKING:
    from fedfa.data.federation import Federation
    from fedfa.experiment import Experiment
    from fedfa.flower.roster import Roster
    from fedfa.flower.view import Operator
    from fedfa.flower.wire import Facts
    from fedfa.runs import Run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run that the app's config describes, or go on with it."""
    from fedfa.errors import UserError
    from fedfa.flower.view import Operator

    operator = Operator()
    try:
        play(grid, Settings.of(context.run_config), operator)
    except UserError as error:
        operator.stopped(str(error))
        raise


def play(grid: Grid, settings: Settings, operator: Operator) -> Run:
    """Play a run over a grid. A folder of its settings that is there already goes on from its last round."""
    from fedfa import simulate
    from fedfa.errors import UserError
    from fedfa.flower.engine import Flower
    from fedfa.flower.post import Post
    from fedfa.flower.roster import Roster
    from fedfa.runs import Run

    config = settings.load()
    folder = Path(settings.out).expanduser() / config.title
    run = Run(folder) if (folder / "experiment.toml").exists() else None
    if run is not None and run.provenance.get("engine") != "flower":
        raise UserError(f"{folder} is a simulation with the same settings: give this run a folder of its own, out = …")
    if run is not None and run.done:
        operator.noticed(f"{folder} is complete already")
        return run
    post = Post(grid, settings.round_timeout)
    roster = Roster(post, settings.sites, config.toml(), operator)
    if run is not None:
        roster.facts.update(_recorded(run))
    roster.wait_for(len(settings.sites), settings.sites, settings.wait, settings.min_sites)
    parts = simulate.Parts.around(config, stand_in(config, settings, roster))
    if run is None:
        run = Run.create(folder, config, _facts(config, parts, roster))
    engine = Flower(
        post,
        roster,
        settings,
        parts.algorithm,
        parts.plan.clients,
        config.weighting,
        run.provenance["federation"],
        config.toml(),
        operator,
    )
    return simulate.play(run, operator, parts, engine)


def stand_in(config: Experiment, settings: Settings, roster: Roster) -> Federation:
    """A federation of the sites' sizes and names without their data: enough to build the network and the plan. A site
    that is not in yet has no samples here."""
    import torch

    from fedfa.data.federation import ClientIndex, Federation

    first: Facts = next(iter(roster.facts.values()))
    images = torch.zeros(2, first.channels, first.height, first.width, dtype=torch.uint8)
    masks = (2, first.height, first.width) if first.task == "segmentation" else (2,)

    def index(name: str) -> ClientIndex:
        samples = roster.facts[name].samples if name in roster.facts else (0, 0, 0)
        return ClientIndex(*(torch.zeros(count, dtype=torch.int64) for count in samples))

    # First a site that is in: the network is tried on the first client's samples.
    names = sorted(settings.sites, key=lambda name: (name not in roster.facts, name))
    clients = {name: index(name) for name in names}
    labels = torch.zeros(masks, dtype=torch.int64)
    return Federation(config.source["name"], first.task, images, labels, first.classes, clients)


def _facts(config: Experiment, parts: Any, roster: Roster) -> dict[str, Any]:
    """What the run's folder says besides versions. Its own name tells it from another run of the same settings, whose
    private state the sites may still have."""
    import torch

    from fedfa import simulate

    here = config.model_copy(update={"engine": "sequential", "device": "cpu"})
    return {
        **simulate.facts(here, parts, torch.device("cpu")),
        "engine": "flower",
        "division": None,
        "data": None,
        "classes": None,
        "federation": f"{config.title}-{secrets.token_hex(4)}",
        "sites": {name: facts.model_dump(mode="json") for name, facts in sorted(roster.facts.items())},
    }


def _recorded(run: Run) -> dict[str, Facts]:
    """The sites' data as they were when the run began."""
    import json

    from fedfa.flower.wire import Facts

    return {name: Facts.model_validate_json(json.dumps(facts)) for name, facts in run.provenance["sites"].items()}

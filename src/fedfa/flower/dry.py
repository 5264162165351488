"""A dry run: server and site do a round's real work in this process, to show what would leave the site."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedfa.experiment import Experiment
from fedfa.files import write_tensors
from fedfa.flower.audit import table
from fedfa.flower.local import LocalGrid
from fedfa.flower.parcel import Parcel
from fedfa.flower.processes import read_site
from fedfa.flower.server_app import play
from fedfa.flower.settings import Settings
from fedfa.flower.site import Site
from fedfa.flower.view import Operator
from fedfa.flower.wire import Reply


def dry_run(folder: Path, config: Experiment, save: Path | None) -> list[str]:
    """What would leave a site that joins this experiment and trains a round, as lines to read."""
    with TemporaryDirectory() as away:
        settings = replace(read_site(folder), folder=str(Path(away) / "site"), worker="")
        site = Site(settings)
        site.prepare(config.toml())  # whoever runs this may see what is wrong with the data
        left: dict[str, Tensor] = {}
        app = ClientApp()

        def answer(message: Message, context: Context) -> Message:
            parcel = site.answer(Parcel.of(message.content))
            reply = Reply.of(parcel)
            left.update({f"{reply.head.kind}/{name}": tensor for name, tensor in reply.tensors.items()})
            return Message(parcel.records(), reply_to=message)

        for register in (app.train(), app.evaluate(), app.query("join"), app.query("share")):
            register(answer)
        alone = config.model_copy(update={"rounds": 1, "held_out": ()})
        run = Settings.of(
            {"experiment": alone.toml(), "sites": settings.name, "min-sites": 1, "wait": 0, "out": f"{away}/runs"}
        )
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            play(LocalGrid(app, {1: {}}), run, Operator())
        lines = table(site.audit.lines())
    if save is not None:
        write_tensors(save, left)
        lines.append(f"wrote {save}: all {len(left)} tensors, as they would leave")
    return lines

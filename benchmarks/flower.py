"""``python -m benchmarks.flower``: what a real federation costs, on 127.0.0.1, with TLS and keys.

1. Seconds a round with a worker at every site, and without one: three sites, LeNet.
2. A model of 50 MB and ten sites: seconds a round, bytes, and how much of it is Flower's own.

Flower's own share is what a round takes longer than the same messages take through a grid in one process, where the
same sites train one after another. On a machine with as many cores as sites it would be larger.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import fedfa
from fedfa import Run
from fedfa.experiment import Experiment
from fedfa.flower.app_folder import write_app
from fedfa.flower.client_app import app
from fedfa.flower.keys import CONNECTION, make_keys
from fedfa.flower.local import LocalGrid
from fedfa.flower.processes import LocalFederation, environment, free_port
from fedfa.flower.server_app import play
from fedfa.flower.settings import Settings
from fedfa.flower.view import Operator

LENET: dict[str, Any] = {
    "name": "small", "source": "digit-sites", "network": "lenet", "algorithm": "fedfa", "batch_size": 16, "lr": 0.05,
    "clip": 2.0, "threads": 1, "device": "cpu",
}  # fmt: skip
ALEXNET: dict[str, Any] = {**LENET, "name": "large", "network": "alexnet", "batch_size": 4, "clip": 0.0}


def main(quick: bool, only: str | None) -> None:
    rounds = 3 if quick else 6
    if only != "large":
        small(rounds)
    if only != "small":
        large(rounds)


def small(rounds: int) -> None:
    config, sites = fedfa.load(LENET, {"rounds": rounds}), ("phone", "scanner", "tablet")
    warm, cold = (seconds(config, sites, {}, worker) for worker in (True, False))
    here = in_one_process(config, sites, {})
    print(f"LeNet, 3 sites: {warm:.1f} s a round with workers, {cold:.1f} s without, {here:.2f} s in one process")


def large(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = tuple(f"site-{number}" for number in range(10))
        for number, name in enumerate(names):
            write_images(Path(folder) / name, name, number)
        paths = {name: str(Path(folder) / name) for name in names}
        config = fedfa.load(ALEXNET, {"rounds": rounds, "source": {"name": "image_folders", "size": 256}})
        whole, alone = seconds(config, names, paths, True), in_one_process(config, names, paths)
        share = f"{1 - alone / whole:.0%} is Flower's own"
        print(f"AlexNet, 10 sites: {whole:.1f} s a round, {alone:.1f} s in one process: {share}")


def write_images(root: Path, site: str, number: int) -> None:
    """Ten images of two classes at one site."""
    draw = torch.Generator().manual_seed(number)
    for image in range(10):
        folder = root / site / f"class-{image % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (256, 256, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{image}.png")


def seconds(config: Experiment, sites: Sequence[str], paths: Mapping[str, str], worker: bool) -> float:
    """A round's seconds over a real SuperLink: the median, without the first, in which the sites read their data."""
    with federation(config, sites, paths, worker) as running:
        words = ["flwr", "run", str(running.folder / "app"), CONNECTION, "--stream"]
        home = environment(running.server / "flower")
        subprocess.run(words, env=home, check=True, capture_output=True, timeout=1800)
        (folder,) = (running.folder / "runs").iterdir()
        return _median(Run(folder))


def in_one_process(config: Experiment, sites: Sequence[str], paths: Mapping[str, str]) -> float:
    """A round's seconds for the same messages without a network, each site's worker after the other."""
    from fedfa.flower.parcel import Parcel
    from fedfa.flower.settings import SiteSettings
    from fedfa.flower.site import Site

    with tempfile.TemporaryDirectory() as folder:
        held = {
            number: Site(SiteSettings(name, path=paths.get(name, ""), folder=f"{folder}/sites/{name}"))
            for number, name in enumerate(sites)
        }

        class Held(LocalGrid):
            def answer(self, message: Any) -> Any:
                from flwr.app import Message

                reply = held[message.metadata.dst_node_id].answer(Parcel.of(message.content))
                return Message(reply.records(), reply_to=message)

        run = Settings.of({"experiment": config.toml(), "sites": ",".join(sites), "out": f"{folder}/runs", "wait": 60})
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return _median(play(Held(app, {number: {} for number in held}), run, Operator()))


@contextmanager
def federation(
    config: Experiment, sites: Sequence[str], paths: Mapping[str, str], worker: bool
) -> Iterator[LocalFederation]:
    """A federation that is up, and ends with the block."""
    with tempfile.TemporaryDirectory() as place:
        made = LocalFederation(Path(place) / "federation")
        make_keys(made.folder / "keys", sites, "127.0.0.1", free_port())
        write_app(made.folder / "app", config, sites, out=str(made.folder / "runs"))
        try:
            made.start_server()
            for name in sites:
                site = made.folder / "keys" / "sites" / name / "site.toml"
                added = f'path = "{paths[name]}"\n' if name in paths else ""
                site.write_text(site.read_text() + added + ("" if worker else 'worker = ""\n'))
                made.register(name)
                made.start_site(name)
            yield made
        finally:
            made.down()


def _median(run: Run) -> float:
    times = [line["seconds"] for line in run.metrics[1:]]
    last = run.metrics[-1]
    print(
        f"  {run.experiment.network['name']}: rounds of {', '.join(f'{time:.1f}' for time in times)} s; "
        f"{last['bytes_down']:,} bytes down and {last['bytes_up']:,} up a site and round",
        flush=True,
    )
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a real federation costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=["small", "large"], help="one of the two")
    given = parser.parse_args()
    main(given.quick, given.only)

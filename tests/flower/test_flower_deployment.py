"""A real SuperLink with three SuperNodes, over TLS and with keys, on 127.0.0.1; started and ended by the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfa
from fedfa import Run
from fedfa.flower.app_folder import write_app
from fedfa.flower.keys import CONNECTION, make_keys
from fedfa.flower.processes import LocalFederation, environment, free_port

pytestmark = pytest.mark.slow
SITES = ("north", "south", "west")
EXPERIMENT: dict[str, Any] = {
    "name": "hospitals", "network": "lenet", "algorithm": "scaffold", "rounds": 3, "batch_size": 4, "threads": 1,
    "device": "cpu", "lr": 0.05, "checkpoint_every": 1,
}  # fmt: skip
PATIENCE = 420.0
"""Seconds that a run may take on a machine that has other things to do."""


def write_images(root: Path, site: str, number: int) -> None:
    """A site's own folder: its images alone, in folders of classes."""
    from PIL import Image

    draw = torch.Generator().manual_seed(number)
    for kind in range(3):
        folder = root / site / f"class-{kind}"
        folder.mkdir(parents=True)
        for sample in range(8 + 2 * number):
            x = 60 * torch.rand(28, 28, 3, generator=draw) + 20 * number
            x[kind :: kind + 2] += 80
            Image.fromarray(x.to(torch.uint8).numpy()).save(folder / f"{sample}.png")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run on one machine, by the sequential engine, with all sites' images in one folder."""
    root = tmp_path_factory.mktemp("alone")
    for number, site in enumerate(SITES):
        write_images(root / "images", site, number)
    source = {"name": "image_folders", "size": 28, "path": str(root / "images")}
    return fedfa.run({**EXPERIMENT, "source": source}, root=root / "runs")


class Federation(LocalFederation):
    def make(self) -> None:
        """Keys, an app, and a folder of images at every site that nobody else can name."""
        make_keys(self.folder / "keys", SITES, "127.0.0.1", free_port())
        config = fedfa.load({**EXPERIMENT, "source": {"name": "image_folders", "size": 28}})
        write_app(self.folder / "app", config, SITES, out=str(self.folder / "runs"), **{"round-timeout": 300})
        for number, name in enumerate(SITES):
            folder = self.folder / "keys" / "sites" / name
            write_images(folder / "data", name, number)
            (folder / "site.toml").write_text((folder / "site.toml").read_text() + '\npath = "data"\n')

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the app; the process shows its log until the run ends."""
        words = ["flwr", "run", str(self.folder / "app"), CONNECTION, "--stream"]
        with open(self.folder / "logs" / "run.log", "ab") as log:
            process = subprocess.Popen(words, env=environment(self.server / "flower"), stdout=log, stderr=log)
        self._started.append(process)
        return process

    def run(self) -> Run:
        return Run(next((self.folder / "runs").iterdir()))

    def recorded(self, rounds: int) -> bool:
        return any((self.folder / "runs").glob("*/experiment.toml")) and self.run().rounds >= rounds

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path / "federation")
    made.make()
    try:
        made.start_server()
        for name in SITES:
            made.register(name)
            made.start_site(name)
        yield made
    finally:
        made.down()
        for process in made._started:
            process.kill()
            process.wait()


def until(condition: Callable[[], bool], federation: Federation) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, federation.log("run")[-3000:]
        time.sleep(0.2)


def supernode(federation: Federation, name: str) -> int:
    """The process of a site's SuperNode: the child of the one that was started."""
    children = subprocess.run(
        ["ps", "-ww", "-o", "pid=,command=", "--ppid", str(federation.processes[name])],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return int(next(line for line in children.splitlines() if "flower-supernode" in line).split()[0])


def descendants(process: int) -> list[int]:
    """A process and all that it has started, it first."""
    files = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return [process, *(one for child in children for one in descendants(child))]


def same(one: Run, other: Run) -> bool:
    """The same numbers, whatever the folders of images are called."""
    (mine, best), (theirs, other_best) = one.latest(), other.latest()  # type: ignore[misc]  # both have checkpoints, or it fails here
    untimed = [[{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics] for run in (one, other)]
    equal = all(torch.equal(tensor, theirs.model[name]) for name, tensor in mine.model.items())
    return equal and mine.model.keys() == theirs.model.keys() and best == other_best and untimed[0] == untimed[1]


def test_the_server_is_killed_and_the_run_goes_on_to_the_bits_of_the_sequential_engine(
    federation: Federation, alone: Run
) -> None:
    stranger = federation.folder / "stranger"  # a site with a key that nobody registered, and one with another CA
    shutil.copytree(federation.folder / "keys" / "sites" / "west", stranger, ignore=shutil.ignore_patterns("worker"))
    make_keys(federation.folder / "other", ["west"], "127.0.0.1", federation.port)
    shutil.copy(federation.folder / "other" / "sites" / "west" / "site.key", stranger / "site.key")
    deceived = federation.folder / "deceived"
    shutil.copytree(federation.folder / "keys" / "sites" / "west", deceived, ignore=shutil.ignore_patterns("worker"))
    shutil.copy(federation.folder / "other" / "server" / "ca.pem", deceived / "ca.pem")
    for folder in (stranger, deceived):
        command = [
            "flower-supernode", f"--superlink=127.0.0.1:{federation.port}", f"--root-certificates={folder / 'ca.pem'}",
            f"--auth-supernode-private-key={folder / 'site.key'}", "--host=127.0.0.1", f"--port={free_port()}",
            "--node-config=name=\"west\"", "--max-retries=1",
        ]  # fmt: skip
        federation.start(folder.name, command, folder / "state" / "flower")

    first = federation.begin()
    until(lambda: federation.recorded(1), federation)
    for process in descendants(federation.processes["server"]):  # its app too, which else may wait for the next server
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    first.wait(timeout=PATIENCE)
    assert federation.run().rounds < EXPERIMENT["rounds"] and not federation.run().done
    federation.start_server()
    until(lambda: federation.begin().wait(timeout=PATIENCE) == 0 and federation.run().done, federation)

    run = federation.run()
    assert run.provenance["resumed"] and same(run, alone)
    for outsider in ("stranger", "deceived"):
        assert "Connection attempt failed" in federation.log(outsider)
        assert "SuperNode ID" in federation.log("west") and "SuperNode ID" not in federation.log(outsider)
    (folder,) = (federation.folder / "keys" / "sites" / "west" / "state" / "runs").iterdir()
    assert sorted(file.name for file in (folder / "memory" / "west").iterdir()) == ["2.safetensors", "3.safetensors"]


def test_a_supernode_is_killed_in_a_round_and_let_in_again(federation: Federation) -> None:
    process = federation.begin()
    until(lambda: federation.recorded(1), federation)
    os.kill(supernode(federation, "south"), signal.SIGKILL)
    until(lambda: not federation.alive(federation.processes["south"]), federation)
    federation.start_site("south")
    process.wait(timeout=PATIENCE)
    run = federation.run()
    assert run.done, federation.log("run")[-3000:]
    assert all(set(line["refused"]) <= {"south"} for line in run.metrics)
    assert "south" in run.metrics[0]["test"]["clients"]


def test_a_federation_to_try_out(tmp_path: Path) -> None:
    def fedfa_flower(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "fedfa", "flower", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout

    try:
        told = fedfa_flower("up", "try", "digit-sites", "rounds=1", "threads=1", "--sites", "3", "--local")
        assert "end:    fedfa flower down try" in told
        fedfa_flower("up", "try", "--local", code=2)
        fedfa_flower("run", "try")
        (run,) = (tmp_path / "try" / "runs").iterdir()
        assert "round 1 of 1, complete" in fedfa_flower("status", str(run))
        assert "train, round 1" in fedfa_flower("audit", "try/keys/sites/phone")
        assert fedfa_flower("down", "try") == "ended: server, phone, scanner, tablet\n"
        fedfa_flower("up", "try", "--local")  # and up again, with the keys that are there
    finally:
        fedfa_flower("down", "try")
    assert not LocalFederation(tmp_path / "try").processes

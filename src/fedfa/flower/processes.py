"""Flower's processes: the server's SuperLink, a site's SuperNode, and a whole federation on this machine."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import tomli_w

from fedfa.errors import UserError
from fedfa.files import write_text
from fedfa.flower import SILENT
from fedfa.flower.keys import CONNECTION
from fedfa.flower.settings import SiteSettings

QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}
"""Flower looks for work once a second, which a round waits for several times."""
GRACE = 10.0
"""Seconds that a process has to end before it is killed."""


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: nothing is sent elsewhere, and their helpers are found beside this Python."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**QUICK, **os.environ, **SILENT, "PATH": path, "FLWR_HOME": str(home.absolute())}


def superlink_command(server: Path, host: str, port: int) -> list[str]:
    """TLS, keys of nodes, controls from this machine alone, a database that survives, and nothing installed by runs."""
    return [
        *(sys.executable, "-m", "fedfa.flower.superlink"),
        f"--host={host}",
        f"--port={port}",
        f"--ssl-ca-certfile={server / 'ca.pem'}",
        f"--ssl-certfile={server / 'server.pem'}",
        f"--ssl-keyfile={server / 'server.key'}",
        "--enable-supernode-auth",
        f"--database={server / 'superlink.db'}",
        "--disable-runtime-dependency-installation",
    ]


def run_server(server: Path, host: str, port: int) -> int:
    """The SuperLink, in the foreground; its exit code."""
    if not (server / "server.key").is_file():
        raise UserError(f"{server} has no server.key: `fedfa flower keys` makes such a folder")
    return _foreground(superlink_command(server.absolute(), host, port), environment(server / "flower"))


def run_site(folder: Path) -> int:
    """A site, in the foreground: its worker in this process, and its SuperNode beside it; the SuperNode's exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    settings = read_site(folder)
    if not settings.superlink:
        raise UserError(f'{folder / "site.toml"} does not say where the server is: superlink = "HOST:PORT"')
    if settings.agreed:
        from fedfa.flower.site import Site

        Site(settings).prepare(Path(settings.agreed).read_text())  # what is wrong with the data shows before it joins
    node = settings.place / "node.toml"
    write_text(node, tomli_w.dumps(node_config(settings)))
    with working(settings) as well:
        return _foreground(supernode_command(folder, settings, node), environment(settings.place / "flower"), well)


@contextmanager
def working(settings: SiteSettings) -> Iterator[Callable[[], bool]]:
    """A worker in a thread of this process, if the site has one; gives a look at whether it is well."""
    from fedfa.flower.worker import work

    stop, failed = threading.Event(), list[BaseException]()

    def worker() -> None:
        try:
            work(settings, stop)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=worker, name="worker")
    if settings.worker:
        thread.start()
    try:
        yield lambda: not failed
    finally:
        stop.set()
        if settings.worker:
            thread.join()
    if failed:
        raise failed[0]


def supernode_command(folder: Path, settings: SiteSettings, node: Path) -> list[str]:
    return [
        "flower-supernode",
        f"--superlink={settings.superlink}",
        f"--root-certificates={folder / 'ca.pem'}",
        f"--auth-supernode-private-key={folder / 'site.key'}",
        "--host=127.0.0.1",
        f"--port={settings.port or free_port()}",
        f"--node-config={node}",
    ]


def read_site(folder: Path) -> SiteSettings:
    """A site's settings from its folder, with every path made absolute."""
    try:
        given: dict[str, Any] = tomllib.loads((folder / "site.toml").read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} has no site.toml: `fedfa flower keys` makes a folder for every site") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{folder / 'site.toml'} cannot be read: {error}") from None
    own = given.pop("settings", {})
    given |= {f"settings.{key}": value for key, value in own.items()}
    for key in ("path", "agreed", "folder"):
        if given.get(key):
            given[key] = str((folder / Path(str(given[key])).expanduser()).absolute())
    given.setdefault("folder", str((folder / "state").absolute()))
    given.setdefault("worker", str(socket_place(folder)))
    return SiteSettings.of(given)


def node_config(settings: SiteSettings) -> dict[str, Any]:
    """A site's settings as Flower's node config."""
    plain = {key: value for key, value in vars(settings).items() if value and key != "own"}
    return {**plain, **({"settings": dict(settings.own)} if settings.own else {})}


def socket_place(folder: Path) -> Path:
    """Where a site's worker listens: in the site's folder, or, where its name is too long for a socket, in a folder of
    the system's for files that do not last, which `serve` makes private."""
    place = folder.absolute() / "worker" / "socket"
    if len(os.fsencode(place)) <= 100:
        return place
    return Path(gettempdir()) / f"fedfa-{os.getuid()}-{sha256(os.fsencode(place)).hexdigest()[:12]}" / "socket"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _foreground(command: Sequence[str], env: Mapping[str, str], well: Callable[[], bool] = lambda: True) -> int:
    """Run a command until it ends, or is to end; a signal to us is handed on to it."""
    try:
        process = subprocess.Popen(command, env=dict(env))
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not there: pip install 'fedfa[flower]'") from None
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while process.poll() is None and not ending.is_set() and well():
            ending.wait(0.2)
    finally:
        end([process.pid], lambda pid: process.poll() is None)
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if ending.is_set() else process.wait()


def end(pids: Sequence[int], alive: Callable[[int], bool]) -> None:
    """Ask processes to end, and kill those that have not after a while."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        left = [pid for pid in pids if alive(pid)]
        for pid in left:
            os.kill(pid, number)
        until = time.monotonic() + seconds
        while any(alive(pid) for pid in left) and time.monotonic() < until:
            time.sleep(0.05)


# A whole federation on one machine


class LocalFederation:
    """A server and its sites as processes of this machine, in a folder that says which they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.server = self.folder / "keys" / "server"
        self._file = self.folder / "processes.json"
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def port(self) -> int:
        """The server's, once there are keys."""
        config = tomllib.loads((self.server / "flower" / "config.toml").read_text())
        return int(config["superlink"][CONNECTION]["address"].rpartition(":")[2])

    @property
    def processes(self) -> dict[str, int]:
        return dict(json.loads(self._file.read_text())) if self._file.exists() else {}

    def start(self, name: str, command: Sequence[str], home: Path) -> None:
        """Start one of its processes, with a log in the folder, and remember which it is."""
        (self.folder / "logs").mkdir(exist_ok=True)
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, env=environment(home), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._started.append(process)
        write_text(self._file, json.dumps({**self.processes, name: process.pid}) + "\n")

    def start_server(self) -> None:
        self.start("server", superlink_command(self.server, "127.0.0.1", self.port), self.server / "flower")
        self._until("server", lambda: _listens(self.port))

    def start_site(self, name: str) -> None:
        folder = self.folder / "keys" / "sites" / name
        self.start(name, [sys.executable, "-m", "fedfa", "flower", "site", str(folder)], folder / "state" / "flower")

    def wait_for_site(self, name: str) -> None:
        """Wait until a site's worker and its SuperNode are there."""
        settings = read_site(self.folder / "keys" / "sites" / name)
        self._until(name, (Path(settings.worker) if settings.worker else settings.place / "node.toml").exists)

    def _until(self, name: str, ready: Callable[[], bool], seconds: float = 120) -> None:
        log = self.folder / "logs" / f"{name}.log"
        end = time.monotonic() + seconds
        while not ready():
            if not self.alive(self.processes[name]):
                raise UserError(f"{name} ended while it was starting; {log} says why")
            if time.monotonic() > end:
                raise UserError(f"{name} is not ready after {seconds:g} s; {log} may say why")
            time.sleep(0.1)

    def register(self, name: str) -> None:
        key = self.folder / "keys" / "sites" / name / "site.pub"
        self.flwr("supernode", "register", str(key), CONNECTION, "--name", name)

    def flwr(self, *words: str) -> str:
        """A command of Flower's, at this federation's server."""
        command = ["flwr", *words]
        done = subprocess.run(
            command, env=environment(self.server / "flower"), capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise UserError(f"{shlex.join(command)} failed: {said[-300:]}")
        return done.stdout

    def alive(self, pid: int) -> bool:
        """Whether a process is there and is this federation's: numbers of processes are used again."""
        shown = subprocess.run(
            ["ps", "-ww", "-o", "stat=,command=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        return str(self.folder) in shown and not shown.startswith("Z")

    def down(self) -> list[str]:
        """End everything that was started here; the names of what was still there."""
        there = {name: pid for name, pid in self.processes.items() if self.alive(pid)}
        end([pid for name, pid in there.items() if name != "server"], self.alive)
        end([pid for name, pid in there.items() if name == "server"], self.alive)
        self._file.unlink(missing_ok=True)
        return list(there)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0

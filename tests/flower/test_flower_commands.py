"""`fedfa flower`: keys, apps, dry runs, status; every mistake in one line."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from hospitals import Quiet, federate, grid_of, settings
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

import fedfa
from fedfa.errors import UserError
from fedfa.files import read_tensors
from fedfa.flower import server_app, superlink
from fedfa.flower.parcel import Parcel
from fedfa.flower.processes import LocalFederation, read_site
from fedfa.flower.settings import Settings, SiteSettings
from fedfa.flower.worker import ask, serve, work

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 on click 8.5
    from typer.testing import CliRunner

    from fedfa.cli import app


def flower(*words: str | Path, code: int = 0) -> str:
    """What a command prints: its output, or the one line of its complaint."""
    result = CliRunner().invoke(app, ["flower", *map(str, words)])
    assert result.exit_code == code, result.output
    if code == 2:
        (line,) = result.stderr.splitlines()
        return line.removeprefix("fedfa: ")
    return result.stdout


# Keys


def test_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    told = flower("keys", folder, "--sites", "north,south", "--host", "fl.example.org", "--port", "4433")
    assert f"fedfa flower site {folder / 'sites' / 'north'}" in told and "--name south" in told
    for path in folder.rglob("*"):
        public = path.suffix in (".pem", ".pub")
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == (0o044 if public else 0), path
    authority, server = (
        x509.load_pem_x509_certificate((folder / "server" / name).read_bytes()) for name in ("ca.pem", "server.pem")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (server.not_valid_after_utc - datetime.now(UTC)).days == 824
    site = folder / "sites" / "north"
    private = load_ssh_private_key((site / "site.key").read_bytes(), None)
    public = load_ssh_public_key((site / "site.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
    assert private.public_key() == public
    assert (site / "ca.pem").read_bytes() == (folder / "server" / "ca.pem").read_bytes()
    assert read_site(site).superlink == "fl.example.org:4433"
    assert "is not empty: keys are never overwritten" in flower("keys", folder, "--sites", "2", code=2)


@pytest.mark.parametrize(("sites", "complaint"), [("0", "between 1 and 1000"), ("a b", "'a b' is no name")])
def test_sites_that_cannot_be(sites: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in flower("keys", tmp_path / "keys", "--sites", sites, code=2)


def test_numbered_sites(tmp_path: Path) -> None:
    flower("keys", tmp_path / "keys", "--sites", "2")
    assert sorted(path.name for path in (tmp_path / "keys" / "sites").iterdir()) == ["site-1", "site-2"]


# Apps


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower, when it builds a bundle
def test_an_app_is_one_that_flower_takes(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    told = flower("new", folder, "digit-sites", "algorithm=fedmix", "rounds=3", "--sites", "scanner,phone")
    assert f"flwr run {folder} --stream" in told
    _, complaints = load_and_validate(folder / "pyproject.toml")
    assert complaints == [] and len(build_fab_from_disk(folder)) < 10_000
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    found = Settings.of(config)
    assert found.sites == ("phone", "scanner") and found.min_sites == 2
    assert found.load().algorithm["name"] == "fedmix" and found.load().rounds == 3
    assert "is not empty" in flower("new", folder, "digit-sites", "--sites", "a,b", code=2)
    assert "sites are names" in flower("new", tmp_path / "other", "digit-sites", code=2)
    assert "unknown key 'ronds'" in flower("new", tmp_path / "other", "digit-sites", "ronds=1", code=2)


# The server


@pytest.mark.parametrize(
    ("path", "client", "status"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.9", 200),
        ("/v1/control/start-run", "10.0.0.9", 403),
        ("/v1/runtime/pull-messages", "10.0.0.9", 403),
        ("/v1/fleet", "10.0.0.9", 403),
        ("/v1/fleet/../control/start-run", "10.0.0.9", 200),  # which no route of Flower's answers
        ("/v1/control/start-run", "127.0.0.1", 200),
        ("/v1/control/start-run", "::1", 200),
        ("/v1/control/start-run", "192.0.2.1", 200),
    ],
)
def test_controls_are_for_the_server_itself(path: str, client: str, status: int) -> None:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("inside")(scope, receive, send)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "client": (client, 4000), "server": ("192.0.2.1", 8000), "headers": []}
    asyncio.run(superlink.ControlFromHere(inner)(scope, None, send))  # type: ignore[arg-type]  # what is refused never listens
    assert sent[0]["status"] == status


def test_the_superlink_starts_guarded_and_its_database_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore import sql_mixin
    from flwr.superlink import cli
    from flwr.superlink import main as link

    started: list[Any] = []
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    monkeypatch.setattr(link, "create_app", lambda *_: Starlette())
    monkeypatch.setattr(cli, "flower_superlink", lambda: started.append(link.create_app()))
    superlink.main()
    assert [middleware.cls for middleware in started[0].user_middleware] == [superlink.ControlFromHere]
    with closing(sqlite3.connect(":memory:")) as connection:
        sql_mixin._set_sqlite_pragmas(connection, None)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (1000 * superlink.WRITE_WAIT,)


def test_flowers_interfaces_are_where_we_think() -> None:
    from flwr.superlink.routers.control import router as control
    from flwr.superlink.routers.fleet.router import router as fleet

    assert all(route.path.startswith("/v1/fleet/") for route in fleet.routes)
    assert not any(route.path.startswith("/v1/fleet") for route in control.routes)


# Sites


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "north"
    folder.mkdir()
    (folder / "site.toml").write_text('name = "north"\n')
    return folder


def test_a_dry_run_shows_what_would_leave_and_nothing_does(site: Path, tiny_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "left.safetensors"
    lines = flower("dry-run", site, tiny_file, "algorithm=fedmix", "--save", saved).splitlines()
    assert [line.split(",")[0] for line in lines if not line.startswith(" ")][:4] == [
        "join",
        "share",
        "train",
        "evaluate",
    ]
    assert any(line.split() == ["gathered/images", "float32", "3×3×12×12", "5,184"] for line in lines)
    assert any(line.split() == ["model/stage.0.weight", "float32", "4×3×3×3", "432"] for line in lines)
    assert lines[-1] == f"wrote {saved}: all 12 tensors, as they would leave"
    assert read_tensors(saved)["share/gathered/images"].shape == (3, 3, 12, 12)
    assert sorted(path.name for path in site.iterdir()) == ["site.toml"]


def test_a_dry_run_says_what_is_wrong_with_the_data(site: Path, tiny_file: Path) -> None:
    (site / "site.toml").write_text('name = "north"\nsource = "image_folders"\npath = "nowhere"\n')
    assert "nowhere" in flower("dry-run", site, tiny_file, code=2)


def test_the_audit_log_as_a_table(site: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    federate(tmp_path, tiny)
    (site / "site.toml").write_text(f'name = "north"\nfolder = "{tmp_path / "sites" / "north"}"\n')
    lines = flower("audit", site).splitlines()
    assert lines[0].startswith("join, round 0: division") and len([li for li in lines if li.startswith("train")]) == 3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "has no site.toml"),
        ("name = [", "cannot be read"),
        ('name = "north"\nprot = 1\n', "did you mean 'port'?"),
        ('name = "north"\n', 'does not say where the server is: superlink = "HOST:PORT"'),
    ],
)
def test_sites_that_are_not_ready(content: str | None, complaint: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "site.toml").write_text(content)
    assert complaint in flower("site", tmp_path, code=2)


def test_a_site_checks_its_data_before_it_joins(site: Path, tiny_file: Path) -> None:
    (site / "site.toml").write_text(
        f'name = "east"\nsuperlink = "127.0.0.1:1"\nagreed = "{tiny_file}"\nclient = "east"\n'
    )
    assert "tiny has no client 'east'" in flower("site", site, code=2)


def test_other_mistakes(tmp_path: Path) -> None:
    assert "has no server.key" in flower("server", tmp_path, code=2)
    assert "say --local" in flower("up", tmp_path / "new", code=2)
    assert "digit-sites has 4 clients, not 9" in flower("up", tmp_path / "new", "--sites", "9", "--local", code=2)
    assert "no client 'fox'; did you mean 'fax'?" in flower("up", tmp_path / "new", "--sites", "fox", "--local", code=2)
    assert "is not up" in flower("run", tmp_path, code=2)
    assert flower("down", tmp_path) == "ended: nothing was running\n"
    assert "no run at" in flower("status", tmp_path / "none", code=2)


def test_without_flower_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.flower.commands.find_spec", lambda name: None)
    assert "pip install 'fedfa[flower]'" in flower("down", "x", code=2)


def test_down_ends_its_own_processes_alone(tmp_path: Path) -> None:
    federation = LocalFederation(tmp_path)
    sleep = "import sys, time; time.sleep(60)"
    federation.start("one", [sys.executable, "-c", sleep, str(tmp_path)], tmp_path)
    with subprocess.Popen([sys.executable, "-c", sleep]) as other:
        (tmp_path / "processes.json").write_text(json.dumps({**federation.processes, "other": other.pid}))
        assert federation.down() == ["one"]
        assert other.poll() is None
        other.kill()
    federation._started[0].wait(timeout=10)


# The operator's view


def test_status(tiny: dict[str, Any], tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    app_of = grid.app

    def breaks(message: Any, context: Any) -> Any:
        if context.node_config["name"] == "south" and message.metadata.message_type == "train":
            raise ValueError("boom")
        return app_of(message, context)

    grid.app = breaks  # type: ignore[assignment]  # an app that breaks, for this test
    run = server_app.play(grid, settings(tmp_path, tiny), Quiet())
    lines = flower("status", run.folder, "--watch").splitlines()
    assert lines[0].endswith(f"{run.folder.name}: round 3 of 3, complete")
    assert [line.split()[0] for line in lines[2:5]] == ["north", "south", "west"]
    assert lines[3].split()[-1] == "3" and "left out: ValueError: boom" in lines[3]
    assert lines[5].startswith("mean of round 3: ")
    assert lines[-1].endswith("south is left out of round 3: ValueError: boom")


# The worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[Any], Path]]:
    """Start a worker in a thread, which ends with the test."""
    stop, threads = threading.Event(), []

    def start(target: Callable[[Path, threading.Event], None]) -> Path:
        path = tmp_path / "w" / "socket"
        threads.append(threading.Thread(target=target, args=(path, stop)))
        threads[-1].start()
        while not path.exists():
            stop.wait(0.01)
        return path

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def test_a_worker_gives_the_same_bits(
    tiny: dict[str, Any], tmp_path: Path, worker: Any, assert_same: Callable[..., None]
) -> None:
    def north(path: Path, stop: threading.Event) -> None:
        work(SiteSettings("north", folder=str(tmp_path / "sites" / "north"), worker=str(path)), stop)

    grid = grid_of(tmp_path)
    grid.nodes[1] |= {"worker": str(worker(north))}
    run = federate(tmp_path, {**tiny, "algorithm": "fedbn"}, grid)
    assert_same(run, fedfa.run({**tiny, "algorithm": "fedbn", "checkpoint_every": 1}, root=tmp_path / "alone"))


def test_a_worker_is_for_its_owner_alone_and_survives_nonsense(worker: Any) -> None:
    path = worker(lambda path, stop: serve(path, lambda parcel: Parcel(parcel.head * 2, parcel.blobs), stop))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for nonsense in (b"", b"\0" * 7, b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(nonsense)
    assert ask(str(path), Parcel("ab", {"x": bytes(3_000_000)})) == Parcel("abab", {"x": bytes(3_000_000)})
    with pytest.raises(UserError, match="another worker is at work"):
        serve(path, lambda parcel: parcel, threading.Event())


def test_a_worker_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="the site's worker is not running"):
        ask(str(tmp_path / "none"), Parcel("{}"))
    with pytest.raises(UserError, match="too long a name"):
        serve(tmp_path / ("x" * 120) / "socket", lambda parcel: parcel, threading.Event())
    long = tmp_path / ("x" * 120)
    long.mkdir()
    (long / "site.toml").write_text('name = "north"\n')
    assert len(read_site(long).worker) < 100


def test_the_thin_client_does_not_import_torch(tmp_path: Path) -> None:
    code = """
import sys
import fedfa.flower.client_app, fedfa.flower.worker
print([name for name in ("torch", "pydantic", "sklearn", "safetensors") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The guide

DOCS = Path(__file__).parents[2] / "docs" / "flower.md"


def test_the_guides_commands_are_there() -> None:
    lines = re.findall(r"^    fedfa (flower .*?)(?:  +#.*)?$", DOCS.read_text(), flags=re.MULTILINE)
    assert len(lines) >= 10
    for line in lines:
        _, command, *words = line.split()
        told = flower(command, "--help")
        for option in (word for word in words if word.startswith("--")):
            assert option in told, line


def test_the_guides_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(block, "flower.md", "exec"), {})

"""`fedfa flower`: a real federation, from its keys to its runs. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedfa.cli_errors import user_errors
from fedfa.errors import UserError

app = typer.Typer(
    help="A real federation, on Flower: see docs/flower.md.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
@user_errors
def installed() -> None:
    if find_spec("flwr") is None:
        raise UserError("a real federation needs Flower: pip install 'fedfa[flower]'")


ExperimentName = Annotated[str, typer.Argument(help="A built-in name, such as digit-sites, or a TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")]
Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Of the server.")]
Federation = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder, as `up` made it.")]


@app.command()
@user_errors
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The app's folder, which is made.")],
    experiment: ExperimentName,
    overrides: Overrides = None,
    sites: Annotated[str, typer.Option("--sites", help="Names of the sites, with commas.")] = "",
    min_sites: Annotated[int, typer.Option("--min-sites", min=1, help="No round starts with fewer.")] = 2,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait for sites.")] = 600,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where run folders go, at the server.")] = Path("runs"),
) -> None:
    """Write an app for `flwr run`: fedfa flower new my-app digit-sites algorithm=fedfa --sites scanner,phone"""
    from fedfa.experiment import load, parse_overrides
    from fedfa.flower.app_folder import write_app

    config = load(experiment, parse_overrides(overrides or []))
    names = [name.strip() for name in sites.split(",") if name.strip()]
    write_app(folder, config, names, wait=wait, out=str(out), **{"min-sites": min_sites})
    print(f"{folder}: {config.algorithm['name']} on {config.source['name']}, sites {', '.join(names)}; start it with")
    print(f"  flwr run {folder} --stream")


@app.command()
@user_errors
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder, which is made.")],
    sites: Annotated[str, typer.Option("--sites", help="How many, or their names with commas.")],
    host: Annotated[str, typer.Option("--host", help="The server's name or address, as sites reach it.")] = "localhost",
    port: Port = 8000,
) -> None:
    """Make a CA, the server's certificate and a key pair for every site; print what each party types."""
    from fedfa.flower.keys import make_keys

    print("\n".join(make_keys(folder, _names(sites), host, port)))


@app.command()
@user_errors
def server(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder `server` that `keys` made.")],
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
) -> None:
    """Run the server: Flower's SuperLink, with TLS and keys of nodes."""
    from fedfa.flower.processes import run_server

    raise typer.Exit(run_server(folder, host, port))


@app.command()
@user_errors
def site(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder, with its site.toml.")]) -> None:
    """Run a site: Flower's SuperNode, and a worker that holds torch, the data and the device."""
    from fedfa.flower.processes import run_site

    raise typer.Exit(run_site(folder))


@app.command("dry-run")
@user_errors
def dry_run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder, with its site.toml.")],
    experiment: ExperimentName,
    overrides: Overrides = None,
    save: Annotated[Path | None, typer.Option("--save", help="A file for all tensors that would leave.")] = None,
) -> None:
    """Show exactly what would leave this site in a round, tensor by tensor. Nothing leaves it."""
    from fedfa.experiment import load, parse_overrides
    from fedfa.flower.dry import dry_run

    for line in dry_run(folder, load(experiment, parse_overrides(overrides or [])), save):
        print(line)


@app.command()
@user_errors
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder, with its site.toml.")],
) -> None:
    """Show everything that has left this site, tensor by tensor."""
    from fedfa.flower.audit import Audit, table
    from fedfa.flower.processes import read_site

    for line in table(Audit(read_site(folder).place).lines()):
        print(line)


@app.command()
@user_errors
def status(
    run: Annotated[Path, typer.Argument(help="The run's folder, at the server.")],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the run is complete.")] = False,
) -> None:
    """Show a run: which sites are in, the round, metrics by site, who failed and why."""
    from fedfa.flower.view import status
    from fedfa.runs import find_run

    while True:
        lines = status(run)
        if watch:
            print("\x1b[2J\x1b[H", end="")
        print("\n".join(lines), flush=True)
        if not watch or find_run(run).done:
            return
        time.sleep(1)


@app.command()
@user_errors
def up(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder, which is made.")],
    experiment: ExperimentName = "digit-sites",
    overrides: Overrides = None,
    sites: Annotated[str, typer.Option("--sites", help="How many of the source's clients, or their names.")] = "3",
    local: Annotated[bool, typer.Option("--local", help="On this machine, at 127.0.0.1.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the server; 0 for a free one.")] = 0,
) -> None:
    """Start a whole federation on this machine, to try it out: fedfa flower up try --sites 3 --local"""
    from fedfa.experiment import load, parse_overrides
    from fedfa.flower.local_federation import up

    if not local:
        raise UserError("up starts everything on this machine: say --local; docs/flower.md is for several machines")
    for line in up(folder, load(experiment, parse_overrides(overrides or [])), sites, port):
        print(line, flush=True)


@app.command()
@user_errors
def run(folder: Federation) -> None:
    """Run the app of a federation that is up, or go on with it."""
    from fedfa.flower.keys import CONNECTION
    from fedfa.flower.processes import LocalFederation, environment

    federation = LocalFederation(folder)
    if not federation.processes:
        raise UserError(f"{folder} is not up: fedfa flower up {folder} --local")
    words = ["flwr", "run", str(federation.folder / "app"), CONNECTION, "--stream"]
    os.execvpe("flwr", words, environment(federation.server / "flower"))


@app.command()
@user_errors
def down(folder: Federation) -> None:
    """End a federation that `up` started."""
    from fedfa.flower.processes import LocalFederation

    ended = LocalFederation(folder).down()
    print(f"ended: {', '.join(ended) or 'nothing was running'}")


def _names(sites: str) -> list[str]:
    """Sites by their names, or so many of them."""
    if sites.isdecimal():
        if not 1 <= int(sites) <= 1000:
            raise UserError(f"--sites is between 1 and 1000, or names, not {sites}")
        return [f"site-{number}" for number in range(1, int(sites) + 1)]
    return [name.strip() for name in sites.split(",") if name.strip()]

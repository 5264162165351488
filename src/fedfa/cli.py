"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fedfa.cli_errors import Commands, user_errors
from fedfa.errors import UserError
from fedfa.flower.commands import app as flower
from fedfa.statistics import MOST_SEEDS

typer.core.HAS_RICH = False  # help in plain text: importing rich for it would double its time

app = typer.Typer(
    cls=Commands,
    help="Federated learning under feature shift, with FedFA at its centre.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BESIDE_RUNS = {"tables", "tuned"}
"""Folders that `fedfa reproduce` and `fedfa tune` make beside runs."""

Root = Annotated[Path, typer.Option("--out", "-o", help="Folder that run folders are made in.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result alone.")]


@app.command()
@user_errors
def run(
    experiment: Annotated[str, typer.Argument(help="A built-in name, such as digit-sites, or a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
    out: Root = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Delete a run with these settings and start anew.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment: fedfa run digit-sites algorithm=fedfa rounds=5"""
    from fedfa.experiment import load, parse_overrides
    from fedfa.report.progress import watch

    config = load(experiment, parse_overrides(overrides or []))

    def play(watcher: Any) -> Any:
        from fedfa.simulate import run

        return run(config, root=out, watcher=watcher, force=force)

    watch(play, quiet)


@app.command()
@user_errors
def resume(run: Annotated[Path, typer.Argument(help="The run's folder.")], quiet: Quiet = False) -> None:
    """Go on with a run that was stopped, to the numbers it would have had."""
    from fedfa.report.progress import watch

    def play(watcher: Any) -> Any:
        from fedfa.simulate import resume

        return resume(run, watcher)

    watch(play, quiet)


@app.command("list")
@user_errors
def list_names(
    matrix: Annotated[bool, typer.Option("--matrix", help="Which of them go together, and why others do not.")] = False,
) -> None:
    """List algorithms, networks, sources, partitions, transforms, augmentations and built-in experiments."""
    if matrix:
        from fedfa.matrix import matrix as combinations
        from fedfa.matrix import tables

        print("\n".join(tables(combinations())))
        return
    from fedfa.experiment import COMPONENTS, builtin_experiments
    from fedfa.report.console import console

    sections = {f"{kind}s": registry.lines for kind, registry in COMPONENTS.items()}
    sections["experiments"] = builtin_experiments()
    width = max(len(name) for lines in sections.values() for name in lines)
    for title, lines in sections.items():
        console.print(f"[bold]{title}[/bold]")
        for name, line in lines.items():
            console.print(f"  {name:<{width}}  {line}", soft_wrap=True, highlight=False)


@app.command()
@user_errors
def show(
    experiment: Annotated[str, typer.Argument(help="A built-in name or a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.")] = None,
) -> None:
    """Print an experiment's whole config as TOML, checked by building all of it."""
    from fedfa.experiment import load, parse_overrides
    from fedfa.simulate import Parts

    config = load(experiment, parse_overrides(overrides or []))
    Parts.build(config)
    print(config.toml(), end="")


@app.command()
@user_errors
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    png: Annotated[Path | None, typer.Option(help="Where the curves go as a picture.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Where the curves go as numbers.")] = None,
) -> None:
    """Put runs side by side: table and curves in the terminal, and as PNG and CSV."""
    from fedfa.report.compare import compare
    from fedfa.report.progress import print_comparison

    # `runs/*` has what else is made beside runs, too
    named = [path for path in runs if path.name not in BESIDE_RUNS or (path / "experiment.toml").exists()]
    print_comparison(compare(*(named or runs)), png, csv)


@app.command()
@user_errors
def reproduce(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE]... [KEY=VALUE]...",
            help="Tables' names, or TOML files; none lists them. And changes to all runs.",
        ),
    ] = None,
    only: Annotated[str, typer.Option("--only", metavar="ROW,…", help="These rows, and the reference row.")] = "",
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, max=MOST_SEEDS, help="Seeds 0 to N − 1 instead of the table's.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="The data set's folder, or one that holds it.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds instead of the table's.")] = None,
    out: Root = Path("runs"),
    at_once: Annotated[int, typer.Option("--at-once", min=0, help="Runs side by side; 0 for what suits.")] = 0,
    variant: Annotated[str, typer.Option("--variant", help="Another reading, where paper and code differ.")] = "",
    tuned: Annotated[Path | None, typer.Option("--tuned", help="Settings that `fedfa tune` has found.")] = None,
    rule: Annotated[str, typer.Option("--rule", help="last, last20 or best: which rounds count.")] = "",
    table_only: Annotated[bool, typer.Option("--table-only", help="Run nothing; show what is there.")] = False,
    sources: Annotated[
        list[Path] | None, typer.Option("--from", help="Run folders or summaries to make it from; may come again.")
    ] = None,
    summaries: Annotated[Path | None, typer.Option("--summaries", help="Write each run as a small JSON there.")] = None,
    quiet: Quiet = False,
) -> None:
    """Reproduce tables of the paper: fedfa reproduce office-main office-variants --data DIR"""
    from fedfa.experiment import parse_overrides
    from fedfa.reproduce.play import Wish, list_tables, reproduce

    tables = [word for word in words or () if "=" not in word]
    found = tuple(sources or ())
    wish = Wish(seeds, only, data, rounds, out, at_once, variant, tuned, rule, table_only, found, summaries, quiet)
    if not words and wish == Wish(out=out):
        list_tables()
        return
    if not tables:
        raise UserError("which table? `fedfa reproduce` lists them")
    reproduce(tables, parse_overrides([word for word in words or () if "=" in word]), wish)


@app.command()
@user_errors
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders that hold runs, or summaries of runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Folder for figures, as PNG and PDF.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Folder for tables, as LaTeX, Markdown and CSV.")] = None,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
) -> None:
    """Make a page of runs, to look at in a browser: fedfa report runs -o report.html"""
    from fedfa.report.write import write_report

    write_report(runs, out, figures, tables, title)


@app.command()
@user_errors
def tune(
    target: Annotated[str, typer.Argument(help="A table's name, a built-in experiment or a TOML file of either.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="For all runs; what is searched for is drawn around it."),
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", min=1, max=MOST_SEEDS, help="For every row, its own settings included.")
    ] = 8,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=MOST_SEEDS, help="Seeds that a trial is judged over.")
    ] = 1,
    search_seed: Annotated[int, typer.Option("--search-seed", help="Of the settings that are drawn.")] = 0,
    only: Annotated[str, typer.Option("--only", metavar="ROW,…", help="These rows, and the reference row.")] = "",
    variant: Annotated[str, typer.Option("--variant", help="Another reading, where paper and code differ.")] = "",
    data: Annotated[Path | None, typer.Option("--data", help="The data set's folder, or one that holds it.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds instead of the table's.")] = None,
    out: Root = Path("runs"),
    at_once: Annotated[int, typer.Option("--at-once", min=0, help="Runs side by side; 0 for what suits.")] = 0,
    file: Annotated[Path | None, typer.Option("--file", help="Where the settings go, instead of OUT/tuned.")] = None,
    quiet: Quiet = False,
) -> None:
    """Search settings on validation data, for reproduce --tuned: fedfa tune digit-sites --trials 4"""
    from fedfa.experiment import parse_overrides
    from fedfa.reproduce.tune import Search, tune

    search = Search(trials, seeds, search_seed, only, variant, data, rounds, out, at_once, file, quiet)
    tune(target, parse_overrides(overrides or []), search)


data = typer.Typer(
    help="Look at data before training on them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data, name="data")
app.add_typer(flower, name="flower")

SourceName = Annotated[str, typer.Option("--source", "-s", metavar="NAME", help="A source that `fedfa list` names.")]
Where = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH] [KEY=VALUE]...",
        help="The source's folder, if it reads one, and settings: the source's own, partition, split and seed.",
    ),
]


@data.command()
@user_errors
def check(
    source: SourceName,
    words: Where = None,
    strict: Annotated[bool, typer.Option("--strict", help="A file that is left out is an error.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show all of long lists.")] = False,
) -> None:
    """Check data: fedfa data check FOLDER --source office_caltech10"""
    from fedfa.data.check import check
    from fedfa.data.look import look

    report = check(look(source, words or []), everything)
    print("\n".join(report.lines), flush=True)
    if report.cannot_train:
        raise UserError(f"cannot train on this: {'; '.join(report.cannot_train)}")
    if strict and report.left_out:
        raise UserError(f"--strict: {report.left_out:,} files or folders were left out")


@data.command()
@user_errors
def preview(
    source: SourceName,
    words: Where = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that pictures are put in.")] = Path("preview"),
    sheets: Annotated[int, typer.Option("--sheets", min=0, help="Contact sheets that are made at most.")] = 12,
) -> None:
    """Draw data: fedfa data preview FOLDER --source office_caltech10 -o pictures"""
    from fedfa.data.look import look
    from fedfa.data.preview import preview

    for line in preview(look(source, words or []), out, sheets):
        print(line, flush=True)


@data.command("split")
@user_errors
def write_splits(
    source: SourceName,
    words: Where = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file.")] = Path("splits.tsv"),
) -> None:
    """Write who has which sample, for split.file=FILE: fedfa data split FOLDER --source cifar10 partition=dirichlet"""
    from fedfa.data.look import look
    from fedfa.data.splitfile import write_splits

    found = look(source, words or [])
    if found.pool is None:
        raise UserError(f"{source} comes divided: its samples have no names to write")
    if found.federation is None:
        raise UserError(found.why)
    write_splits(out, found.pool, found.federation.clients)
    used = sum(len(index.of(part)) for index in found.federation.clients.values() for part in ("train", "val", "test"))
    print(f"{out}: {used:,} of {len(found.pool):,} samples at {len(found.federation.clients):,} clients", flush=True)


def version(show: bool) -> None:
    if show:
        import fedfa

        print(fedfa.__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print it.")] = False,
) -> None: ...


if __name__ == "__main__":
    app()

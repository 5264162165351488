"""What is published is made of the runs that are published with it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fedfa.cli import app

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def test_the_table_is_made_of_its_runs(tmp_path: Path) -> None:
    rows = ["--variant", "plain", "--only", "FedAvg,FedFA"]
    words = ["reproduce", "office-main", *rows, "--table-only", "--quiet", "--from"]
    made = CliRunner().invoke(app, [*words, str(RESULTS / "office-main-plain"), "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    for name in ("office-main-plain.md", "office-main-plain.csv", "office-main-plain.tex"):
        assert (tmp_path / "tables" / name).read_text() == (RESULTS / "tables" / name).read_text()


def test_pages_quote_the_table() -> None:
    """Rows of README and of the results' page hold the table's own numbers, in its order."""
    lines = (RESULTS / "tables" / "office-main-plain.md").read_text().splitlines()
    for row in ("FedAvg", "FedFA"):
        whole = next(line for line in lines if line.startswith(f"| {row} ") and "±" in line)
        cells = [cell.strip() for cell in whole.strip("|").split("|")]
        quoted = f"| {row} | {' | '.join(cells[2:8])} | {cells[-1]} |"
        for page in (ROOT / "README.md", RESULTS / "README.md"):
            assert quoted in page.read_text()

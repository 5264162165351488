"""What is published is made of the runs that are published with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfa.cli import app

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("office-main-plain", ["office-main", "--variant", "plain"]),
        ("mnist-writers", ["mnist-writers", "--seeds", "3"]),
    ],
)
def test_a_table_is_made_of_its_runs(name: str, words: list[str], tmp_path: Path) -> None:
    asked = ["reproduce", *words, "--only", "FedAvg,FedFA", "--table-only", "--quiet"]
    made = CliRunner().invoke(app, [*asked, "--from", str(RESULTS / name), "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    for kind in ("md", "csv", "tex"):
        file = f"{name}.{kind}"
        assert (tmp_path / "tables" / file).read_text() == (RESULTS / "tables" / file).read_text()


def test_pages_quote_the_table() -> None:
    """Rows of README and of the results' page hold the table's own numbers, in its order."""
    lines = (RESULTS / "tables" / "office-main-plain.md").read_text().splitlines()
    for row in ("FedAvg", "FedFA"):
        whole = next(line for line in lines if line.startswith(f"| {row} ") and "±" in line)
        cells = [cell.strip() for cell in whole.strip("|").split("|")]
        quoted = f"| {row} | {' | '.join(cells[2:8])} | {cells[-1]} |"
        for page in (ROOT / "README.md", RESULTS / "README.md"):
            assert quoted in page.read_text()

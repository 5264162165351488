"""What the operator sees: lines in the ServerApp's log, and a status that `fedfa flower status` shows while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfa.files import write_text
from fedfa.report.progress import Plain
from fedfa.runs import Run
from fedfa.server import Record

if TYPE_CHECKING:
    from torch import Tensor

STATUS = "status.json"
LINES = 20
"""Notices that the status keeps."""


class Operator(Plain):
    """Prints how the federation goes, and keeps it in the run's folder."""

    def __init__(self) -> None:
        super().__init__()
        self._status: dict[str, Any] = {"round": 0, "doing": "waiting for sites", "in": [], "turned_away": {}}
        self._status |= {"round_sites": [], "answers": {}, "left_out": {}, "notices": []}

    def run_started(self, run: Run, round: int) -> None:
        super().run_started(run, round)
        self._tell(round=round, doing="starting")

    def noticed(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        notices = [*self._status["notices"], f"{_now()} {line}"][-LINES:]
        self._tell(notices=notices)

    def sites_changed(self, present: Sequence[str], turned_away: dict[str, str]) -> None:
        gone = sorted(set(self._status["in"]) - set(present))
        self._status["in"] = list(present)
        for name in gone:
            self.noticed(f"{name} is gone")
        self._tell(turned_away=turned_away)

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        super().round_started(round, clients)
        self._tell(round=round, doing="training", round_sites=list(clients), answers={})

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None:
        super().client_done(client, loss, refused)
        answer = f"left out: {refused}" if refused else "trained" if loss is None else f"loss {float(loss):.3f}"
        if refused:
            self._status["left_out"][client] = self._status["left_out"].get(client, 0) + 1
        answers = {**self._status["answers"], client: answer}
        doing = "evaluating" if len(answers) == len(self._status["round_sites"]) else "training"
        self._tell(answers=answers, doing=doing)

    def round_done(self, record: Record) -> None:
        super().round_done(record)
        for name, reason in record.refused.items():
            self.noticed(f"{name} is left out of round {record.round}: {reason}")
        self._tell(doing="between rounds")

    def stopped(self, reason: str) -> None:
        """The run ends before its last round."""
        self.noticed(reason)
        self._tell(doing="stopped")

    def _tell(self, **changes: Any) -> None:
        self._status |= changes
        if self.run is not None:
            write_text(self.run.folder / STATUS, json.dumps({**self._status, "at": _now()}, indent=1) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def status(folder: Path) -> list[str]:
    """A federation's run as lines to read: who is in, the round, every site's metric, who failed and why."""
    from fedfa.data.check import table
    from fedfa.runs import find_run

    run = find_run(folder)
    path = run.folder / STATUS
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    doing = "complete" if run.done else f"{told.get('doing', 'not started')}, as of {told.get('at', 'never')}"
    rounds = run.config["rounds"]
    lines = [f"{run.folder.name}: round {max(told.get('round', 0), run.rounds)} of {rounds}, {doing}"]
    tested = next((line for line in reversed(run.metrics) if "test" in line), None)
    scores = tested["test"]["clients"] if tested else {}
    metric = run.provenance["metric"]
    rows = [["site", "in", "samples", f"test {metric}", "this round", "left out"]]
    for name, samples in sorted(run.provenance["samples"].items()):
        rows.append(
            [
                name + (" (held out)" if name in run.config.get("held_out", ()) else ""),
                "yes" if name in told.get("in", ()) else "no",
                str(samples[0]),
                f"{100 * scores[name]:.1f} %" if scores.get(name) is not None else "–",
                told.get("answers", {}).get(name, "waiting" if name in told.get("round_sites", ()) else "–"),
                str(told.get("left_out", {}).get(name, 0)),
            ]
        )
    lines += table(rows, left=2)
    if tested:
        lines.append(f"mean of round {tested['round']}: {100 * tested['test']['mean']:.1f} %")
    lines += [f"turned away: {who}: {why}" for who, why in told.get("turned_away", {}).items()]
    return lines + [f"  {line}" for line in told.get("notices", ())[-5:]]

"""Where Flower is not installed (it is an extra), its tests are not collected, and the report says so."""

from __future__ import annotations

import importlib.util

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob.append("test_*.py")


def pytest_report_header() -> str:
    return "Flower is not installed: its tests are left out" if collect_ignore_glob else "Flower is installed"

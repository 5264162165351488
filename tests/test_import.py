"""`import fedfa` and `fedfa --help` are quick: nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedfa

HEAVY = ("torch", "numpy", "pydantic", "rich", "matplotlib", "sklearn", "safetensors")


def imported_after(code: str, *words: str) -> set[str]:
    """Heavy packages that a fresh interpreter has imported once the code is done."""
    script = f"{code}\nimport sys\nprint('|', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert imported_after("import fedfa; assert fedfa.__version__; dir(fedfa)") == set()


def test_the_command_line_imports_nothing_heavy_for_help() -> None:
    assert imported_after("import fedfa.cli") == set()
    code = "from fedfa.cli import app\ntry: app(prog_name='fedfa')\nexcept SystemExit as end: assert end.code == 0"
    assert imported_after(code, "--help") == set()
    assert not imported_after(code, "run", "--help") & {"torch", "numpy", "rich"}
    assert not imported_after(code, "data", "check", "--help") & {"torch", "numpy", "rich"}


def test_listing_names_does_not_need_torch() -> None:
    code = "from fedfa.cli import app\ntry: app(prog_name='fedfa')\nexcept SystemExit as end: assert end.code == 0"
    assert "torch" not in imported_after(code, "list")


@pytest.mark.parametrize("name", fedfa.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(fedfa, name) is not None
    assert name in dir(fedfa)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'fedfa' has no attribute 'FFB'"):
        fedfa.FFB  # noqa: B018  # looking it up is the test


def test_a_name_is_looked_up_once() -> None:
    fedfa.__dict__.pop("Run", None)
    assert fedfa.Run is fedfa.Run
    assert "Run" in fedfa.__dict__

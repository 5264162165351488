"""What a command does with a user's mistake."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import typer
import typer.core

from fedfa.errors import UserError

PLAINER = "fedfa-plainer"
"""How signs are written that a terminal's encoding lacks: Windows' redirected output has no minus, ASCII no dash."""
PLAIN = str.maketrans({"−": "-", "–": "-", "…": "...", "÷": "/", "×": "x", "±": "+-", "≥": ">=", "²": "2"})


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    return "".join(sign if sign.isascii() else "?" for sign in text), error.end


codecs.register_error(PLAINER, _plainer)


class Stopped(KeyboardInterrupt):
    """SIGTERM: a scheduler or a container asks to end. As after Ctrl-C, a checkpoint is written first."""


def _stop(*_: object) -> None:
    raise Stopped


def user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a user's mistake in one line and exit with 2; exit with 130 on Ctrl-C, and with 143 on SIGTERM."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        with ExitStack() as ending:
            if threading.current_thread() is threading.main_thread():
                ending.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _stop))
            told(*args, **kwargs)

    def told(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            print(f"fedfa: {' '.join(str(error).splitlines())}", file=sys.stderr)
            raise typer.Exit(2) from None
        except Stopped:
            raise typer.Exit(143) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # whoever read our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:  # a full disk, a folder that may not be written
            if error.filename is None and error.errno != errno.ENOSPC:
                raise
            print(f"fedfa: {error.strerror}: {error.filename or 'cannot write'}", file=sys.stderr)
            raise typer.Exit(2) from None

    return guarded


_Usage: Any = typer.BadParameter.__base__
"""What misuse raises: click's UsageError, which newer versions of typer carry inside of them."""


class _Misuse(_Usage.__base__):  # type: ignore[misc]  # see above
    """Words that a command does not take, in one line."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        print(f"fedfa: {self.message}", file=sys.stderr)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except _Usage as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a command by itself prints its help
            raise
        told = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message()).rstrip(".")
        more = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
        raise _Misuse(f"{told[:1].lower()}{told[1:]}{more}") from None


class Commands(typer.core.TyperGroup):
    """Commands whose misuse is one line as well."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors=PLAINER)
        return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)

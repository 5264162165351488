"""The terminal, without anything heavy."""

from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Whoever read our output has gone: as where it is printed without rich."""
        raise BrokenPipeError


console = _Console()

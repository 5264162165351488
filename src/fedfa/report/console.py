"""The terminal, without anything heavy."""

from rich.console import Console

console = Console()

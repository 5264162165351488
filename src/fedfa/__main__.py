"""``python -m fedfa``."""

from fedfa.cli import app

app(prog_name="fedfa")

"""``python -m fedfa.engines.worker FD``: a process of a :class:`~fedfa.engines.crew.Crew`, started by the first one."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from fedfa.engines.crew import serve

if __name__ == "__main__":
    with suppress(BrokenPipeError, EOFError, ConnectionResetError):  # the first process is gone
        serve(Connection(int(sys.argv[1])))

"""A long-lived process at a site that holds torch, the data and the device, behind a Unix socket for its owner alone.

Flower starts a process for every message; with a worker, that process hands the message on and waits. No torch here
before a worker is really started: the thin side imports this too.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedfa.errors import UserError
from fedfa.flower.parcel import Malformed, Parcel
from fedfa.flower.settings import SiteSettings

log = logging.getLogger("fedfa.flower")


def ask(path: str, parcel: Parcel) -> Parcel:
    """A worker's reply to a request. Waits as long as the worker is at work, and no longer than it lives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
        except OSError:
            raise ConnectionError("the site's worker is not running") from None
        try:
            parcel.send(connection)
            connection.shutdown(socket.SHUT_WR)
            return Parcel.receive(connection)
        except (OSError, Malformed):
            raise ConnectionError("the site's worker ended before it had answered") from None


def serve(path: Path, answer: Callable[[Parcel], Parcel], stop: threading.Event) -> None:
    """Answer requests, one at a time, until `stop` is set. The socket lies in a folder that only its owner may enter:
    on some systems a socket's own mode counts for nothing."""
    from fedfa.files import locked

    if len(os.fsencode(path)) > 100:
        raise UserError(f"the worker's socket {path} has too long a name: systems allow about 100 bytes")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(path.parent, 0o700)
    with locked(path.parent) as ours, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        if not ours:
            raise UserError(f"another worker is at work at {path}")
        path.unlink(missing_ok=True)  # of a worker that was killed
        listening.bind(str(path))
        os.chmod(path, 0o600)
        listening.listen()
        listening.settimeout(0.5)
        try:
            while not stop.is_set():
                with suppress(TimeoutError):
                    connection, _ = listening.accept()
                    _handle(connection, answer)
        finally:
            path.unlink(missing_ok=True)


def _handle(connection: socket.socket, answer: Callable[[Parcel], Parcel]) -> None:
    with connection:
        connection.settimeout(600)
        try:
            answer(Parcel.receive(connection)).send(connection)
        except (Malformed, OSError) as error:  # whoever asked has gone, or has sent something else
            log.warning("a request was not answered: %s", error)


def work(settings: SiteSettings, stop: threading.Event) -> None:
    """Be a site's worker until `stop` is set."""
    from fedfa.flower.site import Site

    serve(Path(settings.worker).expanduser(), Site(settings).answer, stop)

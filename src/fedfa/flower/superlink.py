"""Flower's SuperLink, with its controls for the server's own machine alone: ``python -m fedfa.flower.superlink …``.

Flower 1.41 serves three interfaces on one port: for sites (Fleet), operators (Control) and ServerApps (Runtime). It
asks sites for their keys, but whoever reaches the port may start runs, and a run may bring code that the sites then
execute. So what is not for sites is answered here only where the request comes from this machine.

Its database is SQLite, which lets one write at a time, and Flower gives up after five seconds of waiting: ten sites
that sent 50 MB each at the same time lost messages that way. Here they wait longer.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

FOR_SITES = "/v1/fleet/"
WRITE_WAIT = 300
"""Seconds that a write to the database waits for others."""


class ControlFromHere:
    """Answers requests from other machines only where they are a site's."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or str(scope["path"]).startswith(FOR_SITES) or from_here(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse("only from the server itself", 403)(scope, receive, send)


def from_here(scope: Scope) -> bool:
    """Whether a request comes from this machine: by the loopback, or from the very address that it went to."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    return bool(server and client[0] == server[0]) or ipaddress.ip_address(client[0]).is_loopback


def main() -> None:
    """As `flower-superlink`, with its arguments."""
    from flwr.supercore import sql_mixin
    from flwr.superlink import main as link
    from flwr.superlink.cli import flower_superlink

    create = link.create_app

    def create_guarded(*given: Any, **named: Any) -> Any:
        app = create(*given, **named)
        app.add_middleware(ControlFromHere)
        return app

    link.create_app = create_guarded  # where `flower_superlink` looks for it
    vars(sql_mixin)["SQLITE_PRAGMAS"] += (("busy_timeout", str(1000 * WRITE_WAIT)),)  # the last one counts
    flower_superlink()


if __name__ == "__main__":
    main()

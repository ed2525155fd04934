"""`hil web diff`: compare two files in a browser."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path

import click

from hil.controller.cli.commands import command
from hil.controller.cli.options import FILE
from hil.errors import UsageError


@command(epilog="Example: hil web diff actual.npy expected.npy")
@click.argument("a", type=FILE, metavar="A")
@click.argument("b", type=FILE, metavar="B")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port to listen on (default: any free port).")
@click.option(
    "--open/--no-browser", "opens", default=True, help="Open the page in a browser, or only print the address."
)
def diff(a: Path, b: Path, port: int, opens: bool) -> None:
    """Compare two .npy files by element in a browser until Ctrl-C; B is the reference.

    The page is only served locally. To view it from another machine: ssh -L PORT:127.0.0.1:PORT HOST, with this --port.
    """
    try:
        from hil.controller.web.server.pair import serve_pair
    except ModuleNotFoundError as error:
        raise UsageError(f"hil web requires {error.name}", hint="pip install 'hil[web]'") from error

    from hil.controller.analysis.profile.perfetto import has_screen

    def listening(address: str) -> None:
        click.echo(f"{address}\nStop with Ctrl-C.")
        if opens and has_screen():
            # Some browsers block the terminal until they exit.
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    serve_pair(a, b, port, listening=listening)

"""`hil web diff`: two files beside each other in a browser."""

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
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Where to listen (default: any that is free).")
@click.option(
    "--open/--no-browser", "opens", default=True, help="Open the page in a browser, or print its address alone."
)
def diff(a: Path, b: Path, port: int, opens: bool) -> None:
    """Look at two .npy files beside each other, element by element; B is the reference. Ctrl-C ends it.

    It is served on this machine alone. To look from another one: ssh -L PORT:127.0.0.1:PORT HOST, with the --port
    given here.
    """
    try:
        from hil.controller.web.pair import serve_pair
    except ModuleNotFoundError as error:
        raise UsageError(f"hil web needs {error.name}", hint="pip install 'hil[web]'") from error

    from hil.controller.analysis.profile.perfetto import has_screen

    def listening(address: str) -> None:
        click.echo(f"{address}\nCtrl-C ends this.")
        if opens and has_screen():
            # Some browsers occupy the terminal until they end.
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    serve_pair(a, b, port, listening=listening)

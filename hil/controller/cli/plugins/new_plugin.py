"""`hil new-plugin`: create a package that extends hil."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FOLDER, json_option
from hil.controller.cli.screen import answer

_KINDS = ("board", "runtime", "reference")


@make_command("new-plugin", epilog="Example: hil new-plugin acme --kind runtime -o hil-acme")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(_KINDS),
    default="board",
    show_default=True,
    help="Parts of the package.",
)
@click.option("-o", "--out", type=FOLDER, metavar="DIR", help="New directory (default: hil-NAME).")
@json_option
def new_plugin(name: str, kind: str, out: Path | None, as_json: bool) -> None:
    """Create a package for a chip, board or reference NAME, with tests that pass.

    In the package, numpy stands for the chip, and ONNX Runtime for the reference. Replace them with calls of your
    driver or library.

    The kind runtime has a compiler, a runtime and a target. The kind board also has a link and a board config. The kind
    reference has only a reference.
    """
    from hil.controller.records.commands.plugins import NewPlugin
    from hil.controller.workloads.plugin_template import create_package

    folder = out or Path(f"hil-{name}")
    files = create_package(name, kind, folder)
    place = shlex.quote(str(folder))
    document = NewPlugin(folder=str(folder), package=f"hil-{name}", files=[str(file) for file in files])
    answer(
        as_json,
        document,
        f"{folder}: {len(files)} files",
        f"next: pip install -e {place}; pytest {place}; hil plugin check hil-{name}",
    )

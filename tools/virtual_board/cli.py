"""The command ``scripts/virtual-board``: boards that run until they are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hil.errors import EXIT_INTERRUPTED, BoardLost, HilError, UsageError
from tools.virtual_board.board import VirtualBoard
from tools.virtual_board.host import end, require, start_namespaces
from tools.virtual_board.launch import start
from tools.virtual_board.microcontroller import FILE, MicrocontrollerBoard, find_chip, start_microcontroller
from tools.virtual_board.packages import DEBIAN, find_apt
from tools.virtual_board.places import make_private, state_folder
from tools.virtual_board.serial_bridge import LineFaults

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Run virtual boards on this machine, with separate addresses, root file systems and SSH servers.

    Needs root and Debian's packages (fetched once, then cached). Emulated microcontrollers (--chip) need only QEMU.

    \b
    Example:
      scripts/virtual-board up pi --arch aarch64
      scripts/hil board add pi root@IP --identity FILE --known-hosts FILE
      scripts/hil run MODEL.onnx --board pi
      scripts/virtual-board cut pi
      scripts/virtual-board down pi
      scripts/virtual-board up m4 --chip cortex-m4 --config m4.toml
    """


def _find_folder(name: str) -> Path:
    """Return the directory of the board of that name, running or not."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"invalid board name {name!r}", hint="use at most 32 of the characters a-z, 0-9 and -")
    return state_folder() / name


def _find_lock(name: str) -> Path:
    return make_private(state_folder()) / f"{name}.lock"


def _open_board(folder: Path) -> VirtualBoard | MicrocontrollerBoard:
    return MicrocontrollerBoard(folder) if (folder / FILE).exists() else VirtualBoard(folder)


def _find_running(name: str) -> VirtualBoard | MicrocontrollerBoard:
    board = _open_board(_find_folder(name))
    try:
        board.status()
    except BoardLost:
        raise UsageError(
            f"virtual board {name!r} not running", hint=f"start it: scripts/virtual-board up {name}"
        ) from None
    return board


@cli.command()
@click.argument("name")
@click.option(
    "--arch", type=click.Choice(sorted(DEBIAN)), default="x86_64", show_default=True, help="Processor architecture."
)
@click.option("--system", is_flag=True, help="Emulate a whole aarch64 machine with a separate kernel (slower).")
@click.option("--icount", is_flag=True, help="With --system: one core whose clock counts instructions (even slower).")
@click.option(
    "--netem",
    default="",
    metavar="WORDS",
    help='Network quality in both directions, such as "delay 20ms 5ms loss 1% rate 10mbit".',
)
@click.option("--disk", "disk_mb", type=click.IntRange(min=8), default=1024, show_default=True, help="Disk size in MB.")
@click.option(
    "--chip", default="", metavar="CHIP", help="Emulate a microcontroller: cortex-m55, cortex-m4, riscv32, or a chip."
)
@click.option(
    "--baud",
    type=click.IntRange(300, 100_000_000),
    metavar="N",
    help="With --chip: speed of the serial line.  [default: as fast as possible]",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --chip: also write the board config to this file.",
)
@click.pass_context
def up(
    context: click.Context,
    name: str,
    arch: str,
    system: bool,
    icount: bool,
    netem: str,
    disk_mb: int,
    chip: str,
    baud: int | None,
    config: Path | None,
) -> None:
    """Start a board, or switch it on, and print the connection data.

    Prints a line of JSON: {"address": "root@IP", "identity": FILE, "known_hosts": FILE}. The login "tester" has the
    same key, and the password "tester". For a microcontroller: {"address": "serial:DEVICE", "config": FILE}; use
    FILE as --board of hil. --config writes a copy of FILE.
    """
    from filelock import FileLock

    if chip or baud or config:
        _start_chip(context, name, chip, baud or 0, config)
        return
    if icount and not system:
        raise UsageError("--icount requires --system")
    folder = _find_folder(name)
    # Without options, only switch on a microcontroller that runs, for example after `kill`.
    is_plain = all(
        context.get_parameter_source(one) is click.core.ParameterSource.DEFAULT
        for one in context.params
        if one != "name"
    )
    if is_plain and (folder / FILE).exists():
        settings = MicrocontrollerBoard(folder).settings
        _start_chip(context, name, settings["chip"], settings["baud"], None)
        return
    board = VirtualBoard(folder)
    asked: dict[str, Any] = {
        "arch": "aarch64" if system else arch,
        "system": system,
        "icount": icount,
        "netem": netem,
        "disk_mb": disk_mb,
    }
    with FileLock(_find_lock(name)):
        if (folder / FILE).exists():
            raise _already_running(name)
        try:
            board.status()
        except BoardLost:
            # Remove files left after a machine crash.
            board.down()
            start(board.folder, name=name, lifeline=False, **asked)
        else:
            plan = board.plan
            if any(getattr(plan, key) != value for key, value in asked.items()):
                raise _already_running(name)
            board.power_on()
    click.echo(
        json.dumps({"address": board.address, "identity": str(board.identity), "known_hosts": str(board.known_hosts)})
    )


def _already_running(name: str) -> UsageError:
    return UsageError(
        f"virtual board {name!r} already running with different options",
        hint=f"stop it first: scripts/virtual-board down {name}",
    )


def _start_chip(context: click.Context, name: str, chip: str, baud: int, config: Path | None) -> None:
    """Start an emulated microcontroller, or switch it on, and print the connection data."""
    from filelock import FileLock

    if not chip:
        raise UsageError(f"{'--baud' if baud else '--config'} requires --chip")
    for option in ("arch", "system", "icount", "netem", "disk_mb"):
        if context.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT:
            raise UsageError(f"--{option.removesuffix('_mb')} is not for microcontrollers", hint="remove it, or --chip")
    folder = _find_folder(name)
    with FileLock(_find_lock(name)):
        board = _open_board(folder)
        try:
            board.status()
        except BoardLost:
            # Remove files left after a machine crash.
            board.down()
            board = start_microcontroller(folder, chip, baud=baud, lifeline=False)
        if not isinstance(board, MicrocontrollerBoard) or (find_chip(chip), baud) != (
            board.settings["chip"],
            board.settings["baud"],
        ):
            raise _already_running(name)
        board.ask("power_on")
    if config:
        try:
            shutil.copyfile(board.config, config)
        except OSError as error:
            raise UsageError(f"cannot write {config}: {error.strerror}") from None
    click.echo(json.dumps({"address": board.address, "config": str(board.config)}))


@cli.command()
@click.argument("name")
def down(name: str) -> None:
    """End a board and delete the disk. A missing board is not an error."""
    from filelock import FileLock, Timeout

    _open_board(_find_folder(name)).down()
    lock = _find_lock(name)
    # A command that starts the board needs its lock.
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        lock.unlink(missing_ok=True)


@cli.command()
def check() -> None:
    """Check that this machine can run virtual boards: tools, namespaces and Debian packages.

    Prints a line of JSON: {"found": TEXT, "problem": TEXT, "fix": TEXT}. The exit code is 2 after a problem.
    """
    try:
        require()
        with tempfile.TemporaryDirectory(prefix="hil-board-") as folder:
            end(start_namespaces(Path(folder), "true"))
        apt = find_apt()
    except UsageError as error:
        click.echo(json.dumps({"found": "", "problem": error.message, "fix": error.hint}))
        sys.exit(error.exit_code)
    found = f"namespaces work; {apt} fetches the boards' packages and emulators"
    click.echo(json.dumps({"found": found, "problem": "", "fix": ""}))


@cli.command("list")
def list_() -> None:
    """List the boards: name, processor, address, power, cable."""
    found = [*state_folder().glob("*/plan.json"), *state_folder().glob(f"*/{FILE}")]
    for folder in sorted(path.parent for path in found):
        board = _open_board(folder)
        try:
            status = board.status()
        except BoardLost:
            status = {"power": "gone", "cable": "gone"}
        if isinstance(board, MicrocontrollerBoard):
            kind = str(board.settings["chip"])
        else:
            kind = board.arch + (" system" if board.plan.system else "")
        click.echo(f"{folder.name}\t{kind}\t{board.address}\tpower {status['power']}\tcable {status['cable']}")


# Requests to a microcontroller with a different name from the command.
_VERBS = {"reboot": "reset"}


def _add_command(name: str, what: Callable[[VirtualBoard], None], text: str) -> None:
    @cli.command(name, help=text)
    @click.argument("board_name", metavar="NAME")
    def command(board_name: str) -> None:
        board = _find_running(board_name)
        if isinstance(board, MicrocontrollerBoard):
            board.ask(_VERBS.get(name, name))
        else:
            what(board)


_add_command(
    "cut", VirtualBoard.cut, "Disconnect the network cable or the serial line: data vanishes without an error."
)
_add_command("restore", VirtualBoard.restore, "Reconnect the network cable or the serial line.")
_add_command("reboot", VirtualBoard.reboot, "Power-cycle the board: all processes die, the disk stays.")
_add_command(
    "kill", VirtualBoard.kill, "Cut the power; `up` restores it. [mcu] flash or reset also restarts a microcontroller."
)
_add_command(
    "freeze",
    VirtualBoard.freeze,
    "Hang the board: every process stops. [mcu] flash or reset restarts a microcontroller.",
)
_add_command("thaw", VirtualBoard.thaw, "Resume a frozen board.")


@cli.command()
@click.argument("name")
@click.argument("faults", default="")
def faults(name: str, faults: str) -> None:
    """Set the faults of a microcontroller's serial line: probabilities for each 64 bytes, or nothing for a good line.

    \b
    Example:
      scripts/virtual-board faults m4 loss=0.01,flip=0.001,repeat=0.01,delay=0.01
    """
    board = _find_running(name)
    if not isinstance(board, MicrocontrollerBoard):
        raise UsageError(f"virtual board {name!r} has no serial line", hint="set the network's quality: up --netem")
    LineFaults.parse(faults)
    board.ask("faults", faults)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec(command: tuple[str, ...]) -> None:
    """Run a command on this machine, which can reach the boards.

    \b
    Example:
      scripts/virtual-board exec -- ssh root@IP uname -m
    """
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from None


def main() -> None:
    """Run the command and exit with the command's exit code. Report errors without a traceback."""
    code: Any
    try:
        code = cli.main(prog_name="scripts/virtual-board", standalone_mode=False)
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = EXIT_INTERRUPTED
    except HilError as error:
        click.echo(f"virtual-board: {error}", err=True)
        if error.detail:
            click.echo(error.detail, err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

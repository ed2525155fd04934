"""`hil board logs`, `shell`, `reset`, `recover`, `deploy`, `clean` and `reset-fence`."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.board.options import add_board_place, choose_place, connect_agent, is_over_ssh, open_shell
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_file, complete_runtimes
from hil.core.files import open_file
from hil.core.runtimes import list_known_runtimes
from hil.core.scratch import make_temporary_folder
from hil.errors import (
    EXIT_BOARD,
    EXIT_OK,
    BoardBusy,
    BoardError,
    BoardUnfit,
    BoardUnreachable,
    StorageError,
    UsageError,
    did_you_mean,
    format_expected,
)

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.devices.deploy.ensure import AgentPlace
    from hil.controller.devices.ssh.shell import Shell


@make_command(epilog="Example: hil board logs root@192.168.7.2 --lines 50")
@add_board_place
@click.option(
    "--lines", default=200, show_default=True, type=click.IntRange(1), help="Number of lines to print, from the end."
)
@json_option
def logs(as_json: bool, lines: int, **settings: Any) -> None:
    """Print the logs of a board's agent, even if the agent is not running.

    Over SSH, the command prints the agent's log file. For an agent with an address, the command prints the stderr of
    the programs.
    """
    from hil.controller.devices.deploy.probe import read_logs as agents_log
    from hil.controller.records.commands.boards import BoardLogs

    choice = choose_place(settings)
    if is_over_ssh(choice):
        with open_shell(choice) as there:
            text = agents_log(there, choice.config.connection.folder, lines=lines).splitlines()
    else:
        with connect_agent(choice) as client:
            client.describe()
            client.open_session("hil board logs", wait_s=5.0, on_wait=print_message)
            text = list(client.logs()[-lines:])
    if not text:
        print_message(f"{choice.name}: the log is empty; the agent's first start creates it")
    answer(as_json, BoardLogs(board=choice.name, lines=text), *text)


@make_command(epilog="Example: hil board shell root@192.168.7.2 -- dmesg -T")
@add_board_place
@click.argument("argv", nargs=-1, metavar="[-- COMMAND...]")
def shell(argv: tuple[str, ...], **settings: Any) -> int:
    """Open a shell on a board, or run COMMAND there. The exit code is that of the shell or of COMMAND.

    hil verifies the host key of the board."""
    with open_shell(choose_place(settings)) as there:
        return there.interactive(argv)


@make_command(epilog="Example: hil board reset rpi5 --action cycle")
@add_board_place
@click.option(
    "--action",
    type=click.Choice(["reset", "off", "on", "cycle"]),
    help="Action (default: reset if the config defines it, otherwise cycle).",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until the board responds.")
@json_option
def reset(as_json: bool, action: str | None, no_wait: bool, **settings: Any) -> None:
    """Reset a board or switch the power with [power] of the board's config, and wait until the board responds."""
    from hil.controller.devices.console.board_console import use_console
    from hil.controller.devices.power_control.power import connect_with_retry, switch
    from hil.controller.records.commands.boards import ResetReport

    choice = choose_place(settings)
    power = choice.config.power
    action = action or ("reset" if power.can("reset") or not power.can("cycle") else "cycle")
    wait = not no_wait and action != "off"
    before = ""
    if wait and action != "on" and power.can(action):
        with contextlib.suppress(BoardError):
            before = _read_boot_id(choice)
    start = time.monotonic()
    # The console is open before the power is switched, so that no line of the boot is lost.
    with use_console(choice.config if wait else None, print_message) as console:
        with contextlib.nullcontext() if console is None else console.time_boot():
            output = switch(power, action, board=choice.name)
        if wait:
            connect_with_retry(lambda: _require_reboot(choice, before), power.boot_s)
    seconds = time.monotonic() - start
    boot_s = None if console is None else console.boot_s
    answer(
        as_json,
        ResetReport(board=choice.name, action=action, answers=wait, seconds=seconds, output=output, boot_s=boot_s),
        f"{choice.name}: {action} done" + (f", the board responds after {seconds:.1f} s" if wait else ""),
    )


@make_command(epilog="Example: hil board recover rpi5")
@add_board_place
@click.option(
    "--runtime",
    default="",
    metavar="NAME",
    help="Runtime of the check (default: the board's).",
    shell_complete=complete_runtimes,
)
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0.1),
    metavar="S",
    help="Time limit for each load and each run of the check.",
)
@json_option
def recover(as_json: bool, runtime: str, timeout: float, **settings: Any) -> int:
    """Recover a stuck board with the steps in its config's [recover].

    hil runs a tiny model at the start and after each step, and stops when the model works. Without [recover], the steps
    are the reset and the power cycle of [power]. Exit code: 0 if the board works, 4 if it does not.
    """
    from hil.controller.devices.power_control.recovery import recover_board
    from hil.controller.records.commands.boards import RecoveryReport
    from hil.controller.workloads.board_checks import find_inference_fault

    choice = choose_place(settings)
    done = recover_board(
        choice, lambda: find_inference_fault(choice, runtime=runtime, timeout_s=timeout), say=print_message
    )
    helped = done.steps[-1].name if done.steps else ""
    if done.problem is None:
        text = f"{choice.name} works; no recovery steps needed"
    elif done.left is None:
        text = f"{choice.name} works after: {helped}"
    elif not done.steps:
        text = f"{choice.name} does not work: {done.left.message}"
        print_message(f"{choice.name}: missing [recover] steps and [power] in the board's config")
    else:
        text = f"{choice.name} still does not work: {done.left.message}"
    code = EXIT_OK if done.is_working else EXIT_BOARD
    report = RecoveryReport(board=choice.name, works=done.is_working, steps=list(done.steps), exit_code=code)
    return answer(as_json, report, text)


def _require_reboot(choice: BoardChoice, before: str) -> None:
    """Raise BoardUnreachable until the board responds with a boot ID other than ``before``."""
    boot_id = _read_boot_id(choice)
    if before and boot_id == before:
        raise BoardUnreachable(
            "the board has not rebooted since the reset",
            board=choice.name,
            hint="check the command in [power] of the board's config",
        )


def _read_boot_id(choice: BoardChoice) -> str:
    """Return a board's boot ID over the fastest connection; "" if the board does not report it."""
    if is_over_ssh(choice):
        with open_shell(choice) as there:
            return there.run(["cat", "/proc/sys/kernel/random/boot_id"], check=False).text
    with connect_agent(choice) as client:
        return str(client.describe(timeout=5.0).machine.boot_id)


def _check_runtimes(_: click.Context, option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Raise UsageError for a runtime that neither hil nor an installed package has."""
    known = list_known_runtimes()
    for name in names:
        if name not in known:
            raise UsageError(
                f"invalid {option.opts[0]} {name!r}",
                hint=f"{did_you_mean(name, known)}{format_expected(known)}; for a runtime of a package, use --package",
            )
    return names


@make_command(
    epilog="Examples: hil board deploy root@192.168.7.2 --runtime iree --runtime onnxruntime; "
    "hil board deploy rpi5 --package ./hil-npx"
)
@add_board_place
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    callback=_check_runtimes,
    shell_complete=complete_runtimes,
    help="Runtime to install (default: the board's). Repeatable.",
)
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="DIR|WHEEL|NAME",
    shell_complete=complete_file,
    help="Package with a runtime: a project's directory, a wheel, or the name of a published package. Repeatable.",
)
@json_option
def deploy(as_json: bool, runtimes: tuple[str, ...], packages: tuple[str, ...], **settings: Any) -> None:
    """Deploy hil's agent to a board and start it. An up-to-date agent is not sent.

    With --package, hil builds or fetches the wheel, installs the wheel next to the agent, and checks that the runtime
    works on the board. The board verifies the digest of all files. Later runs with --runtime NAME use the package.
    """
    from hil.controller.devices.deploy.ensure import AgentRecipe, ensure_agent, find_interpreter
    from hil.controller.devices.deploy.probe import read_status
    from hil.controller.devices.deploy.vendor_packages import MARK, prepare_packages
    from hil.controller.records.commands.boards import DeployedAgent, DeployedPackage

    choice = choose_place(settings)
    folder = choice.config.connection.folder
    start = time.monotonic()
    wanted = runtimes if runtimes or packages else (choice.config.runtime,)
    with make_temporary_folder("hil-package-") as built, open_shell(choice) as there:
        find = partial(find_interpreter, there, folder, choice.name)
        vendors = prepare_packages(packages, Path(built), wanted, find) if packages else ()
        recipe = AgentRecipe.of(wanted, vendors)
        place = ensure_agent(there, recipe, folder=folder, board=choice.name, say=print_message)
        now = read_status(there, folder, board=choice.name)
        used = now.used_bytes or 0
        known = list_known_runtimes()
        of_packages = [name for name in runtimes if known[name].of_package]
        of_packages += [name for vendor in vendors for name in vendor.runtimes]
        _check_deployed(there, place, of_packages, choice.name)
    seconds = time.monotonic() - start
    names = [name for name in now.agent.runtimes if not name.startswith(MARK)]
    deployed = DeployedAgent(
        board=choice.name,
        folder=place.folder,
        build=place.build,
        runtimes=names,
        packages=[
            DeployedPackage(name=one.package.title, id=one.package.id, runtimes=list(one.runtimes)) for one in vendors
        ],
        pushed_bytes=place.pushed_bytes,
        used_bytes=used,
        seconds=seconds,
    )
    sent = f"{place.pushed_bytes / 1e6:.1f} MB sent" if place.pushed_bytes else "already deployed"
    answer(
        as_json,
        deployed,
        f"{choice.name}: agent {place.build} with {', '.join(names)} runs in {place.folder}",
        *(f"{one.package.title}: installed as {one.package.id}, {', '.join(one.runtimes)} works" for one in vendors),
        f"{sent}, {used / 1e6:.0f} MB used on the board, {seconds:.1f} s",
    )


def _check_deployed(shell: Shell, place: AgentPlace, runtimes: list[str], board: str) -> None:
    """Raise BoardUnfit if a runtime of a package does not work on the board."""
    if not runtimes:
        return
    from hil.controller.devices.agent_client.client import AgentClient
    from hil.controller.devices.board_client import AgentEndpoint
    from hil.controller.devices.ssh.tunnel import open_any_tunnel

    with (
        contextlib.closing(open_any_tunnel(shell, place.socket, place.python, print_message)) as tunnel,
        contextlib.closing(AgentClient(AgentEndpoint(tunnel.address), board)) as client,
    ):
        errors = {one.name: one.error for one in client.describe().runtimes}
    for name in runtimes:
        if name not in errors:
            why, hint = "the package is not installed there", "install the package with --package DIR"
        else:
            why = errors[name]
            hint = "a runtime's module may import hil.agent.plugins, numpy and its own package, but not hil.plugins"
        if why:
            raise BoardUnfit(f"the runtime {name} does not work on the board: {why}", board=board, hint=hint)


@make_command(epilog="Example: hil board clean root@192.168.7.2")
@add_board_place
@click.option("--force", is_flag=True, help="Proceed even if the agent is in use.")
@json_option
def clean(as_json: bool, force: bool, **settings: Any) -> None:
    """Stop hil's agent on a board and remove all hil files."""
    from hil.controller.devices.deploy.probe import clean as remove
    from hil.controller.records.commands.boards import RemovedAgent

    choice = choose_place(settings)
    with open_shell(choice) as there:
        was = remove(there, choice.config.connection.folder, board=choice.name, force=force)
    freed = was.used_bytes or 0
    text = f"{was.folder} removed, {freed / 1e6:.0f} MB freed"
    if was.used_bytes is None:
        text = f"no hil files in {was.folder}"
    removed = was.used_bytes is not None
    report = RemovedAgent(board=choice.name, folder=was.folder, removed=removed, freed_bytes=freed)
    answer(as_json, report, f"{choice.name}: {text}")


@make_command("reset-fence", epilog="Example: hil board reset-fence --board root@192.168.7.2")
@add_board_place
@click.option(
    "--store",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Store directory of a stopped agent on this machine (its --store), instead of a board.",
)
@click.option("--force", is_flag=True, help="Proceed even if the agent is in use.")
@json_option
def reset_fence(as_json: bool, store: Path | None, force: bool, **settings: Any) -> None:
    """Reset a board's fence (session number) if the fence file is damaged or the number has reached the maximum.

    Stops the agent. The next use of the board starts the agent again. After the reset, the board accepts sessions with
    older fences until a session uses a higher fence: make sure that no older session is active. A farm continues with
    its own counter.
    """
    from hil.controller.devices.deploy.probe import reset_fence as reset_there
    from hil.controller.records.commands.boards import FenceReset

    if store is not None:
        settings.pop("addr")
        name = str(store)
        _reset_store(store)
    else:
        choice = choose_place(settings)
        name = choice.name
        if not is_over_ssh(choice):
            raise UsageError(
                f"cannot find the store directory of {name}'s agent",
                hint="stop the agent and specify the store with --store; simulators started by hil have no fence file",
            )
        with open_shell(choice) as there:
            reset_there(there, choice.config.connection.folder, board=name, force=force)
    answer(as_json, FenceReset(board=name, fence=0), f"{name}: fence reset")


def _reset_store(store: Path) -> None:
    """Reset the fence of an agent on this machine, given its store directory."""
    import fcntl

    try:
        with open_file(store / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (store / "fence").unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise UsageError(f"{store} is not an agent store", hint="specify the agent's --store directory") from error
    except BlockingIOError as error:
        raise BoardBusy(
            f"the agent of {store} is running", hint="stop the agent first: it keeps the fence in memory"
        ) from error
    except OSError as error:
        raise StorageError(f"cannot reset the fence in {store}: {error.strerror}") from error

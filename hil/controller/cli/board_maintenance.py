"""`hil board logs`, `shell`, `reset`, `deploy`, `clean` and `reset-fence`: hands on a board."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.board_options import agent_at, board_place, chosen_place, is_over_ssh, shell_at
from hil.controller.cli.commands import command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, say
from hil.core.runtimes import RUNTIMES
from hil.errors import BoardBusy, BoardError, BoardUnreachable, StorageError, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice


@command(epilog="Example: hil board logs root@192.168.7.2 --lines 50")
@board_place
@click.option("--lines", default=200, show_default=True, type=click.IntRange(1), help="How many of the last ones.")
@json_option
def logs(as_json: bool, lines: int, **settings: Any) -> None:
    """Print what a board's agent wrote, whether it still runs or not.

    Over SSH that is the agent's log file; of an agent that listens by itself, what its programs wrote to stderr.
    """
    from hil.controller.devices.deploy.probe import logs as agents_log

    choice = chosen_place(settings)
    if is_over_ssh(choice):
        with shell_at(choice) as there:
            text = agents_log(there, choice.config.connection.folder, lines=lines).splitlines()
    else:
        with agent_at(choice) as client:
            client.describe()
            client.open_session("hil board logs", wait_s=5.0, on_wait=say)
            text = client.logs()[-lines:]
    if not text:
        say(f"{choice.name}: nothing was written there; an agent's log begins when it is started the first time")
    answer(as_json, {"board": choice.name, "lines": text}, *text)


@command(epilog="Example: hil board shell root@192.168.7.2 -- dmesg -T")
@board_place
@click.argument("argv", nargs=-1, metavar="[-- COMMAND...]")
def shell(argv: tuple[str, ...], **settings: Any) -> int:
    """Open a shell on a board, or run a COMMAND there, with the host key verified; ends with its exit code."""
    with shell_at(chosen_place(settings)) as there:
        return there.interactive(argv)


@command(epilog="Example: hil board reset rpi5 --action cycle")
@board_place
@click.option(
    "--action",
    type=click.Choice(["reset", "off", "on", "cycle"]),
    help="What to do (default: reset where the config has it, else cycle).",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until the board answers again.")
@json_option
def reset(as_json: bool, action: str | None, no_wait: bool, **settings: Any) -> None:
    """Reset a board, or switch its power, by what its config's [power] says, and wait until it answers again."""
    from hil.controller.devices.power import answering, switch

    choice = chosen_place(settings)
    power = choice.config.power
    action = action or ("reset" if power.can("reset") or not power.can("cycle") else "cycle")
    wait = not no_wait and action != "off"
    before = ""
    if wait and action != "on" and power.can(action):
        with contextlib.suppress(BoardError):
            before = _boot_id(choice)
    start = time.monotonic()
    output = switch(power, action, board=choice.name)
    if wait:
        answering(lambda: _after(choice, before), power.boot_s)
    seconds = time.monotonic() - start
    answer(
        as_json,
        {"board": choice.name, "action": action, "answers": wait, "seconds": seconds, "said": output},
        f"{choice.name}: {action} done" + (f", it answers again after {seconds:.1f} s" if wait else ""),
    )


def _after(choice: BoardChoice, before: str) -> None:
    """Raise BoardUnreachable until the board answers from another boot than the one before."""
    boot_id = _boot_id(choice)
    if before and boot_id == before:
        raise BoardUnreachable(
            "the board still runs as before the reset", board=choice.name, hint="does its hook work?"
        )


def _boot_id(choice: BoardChoice) -> str:
    """Which boot a board is in, by the cheapest way there is to it; "" where it does not say."""
    if is_over_ssh(choice):
        with shell_at(choice) as there:
            return there.run(["cat", "/proc/sys/kernel/random/boot_id"], check=False).text
    with agent_at(choice) as client:
        return str(client.describe(timeout=5.0).machine.boot_id)


@command(epilog="Example: hil board deploy root@192.168.7.2 --runtime iree --runtime onnxruntime")
@board_place
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    type=click.Choice(RUNTIMES),
    help="What it is to run programs with; repeats (default: the board's).",
)
@json_option
def deploy(as_json: bool, runtimes: tuple[str, ...], **settings: Any) -> None:
    """Put hil's agent on a board and start it; nothing is sent where it is there already."""
    from hil.controller.devices.deploy.ensure import Recipe, ensure_agent
    from hil.controller.devices.deploy.probe import status

    choice = chosen_place(settings)
    folder = choice.config.connection.folder
    start = time.monotonic()
    with shell_at(choice) as there:
        recipe = Recipe.of(runtimes or (choice.config.runtime,))
        place = ensure_agent(there, recipe, folder=folder, board=choice.name, say=say)
        now = status(there, folder, board=choice.name)
        used = now.used_bytes or 0
    seconds = time.monotonic() - start
    found = {"folder": place.folder, "build": place.build, "pushed_bytes": place.pushed_bytes}
    found |= {"runtimes": now.agent.runtimes, "used_bytes": used, "seconds": seconds}
    sent = f"{place.pushed_bytes / 1e6:.1f} MB sent" if place.pushed_bytes else "nothing was sent"
    answer(
        as_json,
        {"board": choice.name, **found},
        f"{choice.name}: agent {place.build} with {', '.join(now.agent.runtimes)} runs in {place.folder}",
        f"{sent}, {used / 1e6:.0f} MB used there, {seconds:.1f} s",
    )


@command(epilog="Example: hil board clean root@192.168.7.2")
@board_place
@click.option("--force", is_flag=True, help="Even if somebody uses the agent.")
@json_option
def clean(as_json: bool, force: bool, **settings: Any) -> None:
    """End hil's agent on a board and remove all that hil put there."""
    from hil.controller.devices.deploy.probe import clean as remove

    choice = chosen_place(settings)
    with shell_at(choice) as there:
        was = remove(there, choice.config.connection.folder, board=choice.name, force=force)
    freed = was.used_bytes or 0
    text = f"{was.folder} removed, {freed / 1e6:.0f} MB freed"
    if was.used_bytes is None:
        text = f"there was nothing of hil's in {was.folder}"
    found = {"folder": was.folder, "removed": was.used_bytes is not None, "freed_bytes": freed}
    answer(as_json, {"board": choice.name, **found}, f"{choice.name}: {text}")


@command("reset-fence", epilog="Example: hil board reset-fence --board root@192.168.7.2")
@board_place
@click.option(
    "--store",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The --store of an agent on this machine, which must not run; in place of a board.",
)
@click.option("--force", is_flag=True, help="Even if somebody uses the agent.")
@json_option
def reset_fence(as_json: bool, store: Path | None, force: bool, **settings: Any) -> None:
    """Let a board's count of fences begin anew: its file is damaged, or somebody has counted to its end.

    The agent is ended first; the next use of the board starts it. Whoever held the board by an older fence may come in
    again until a higher one is used, so see to it that nobody does. A farm goes on with its own count.
    """
    from hil.controller.devices.deploy.probe import reset_fence as reset_there

    if store is not None:
        settings.pop("addr")
        name = str(store)
        _reset_store(store)
    else:
        choice = chosen_place(settings)
        name = choice.name
        if not is_over_ssh(choice):
            raise UsageError(
                f"hil does not know where the agent of {name} keeps its state",
                hint="stop it, and name its folder with --store; a simulator that hil starts by itself keeps none",
            )
        with shell_at(choice) as there:
            reset_there(there, choice.config.connection.folder, board=name, force=force)
    answer(as_json, {"board": name, "fence": 0}, f"{name}: its fences begin anew")


def _reset_store(store: Path) -> None:
    """Let an agent on this machine, whose folder this is, count its fences anew."""
    import fcntl

    try:
        with (store / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (store / "fence").unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise UsageError(f"{store} is no agent's store", hint="name the folder that the agent was given") from error
    except BlockingIOError as error:
        raise BoardBusy(f"the agent of {store} runs", hint="stop it first: it knows its fence") from error
    except OSError as error:
        raise StorageError(f"the fence in {store} cannot be reset: {error.strerror}") from error

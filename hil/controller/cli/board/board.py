"""`hil board`: list, inspect, check and maintain boards."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import click

from hil.controller.cli.board.console import console, provision
from hil.controller.cli.board.devices import list_devices
from hil.controller.cli.board.maintenance import clean, deploy, logs, recover, reset, reset_fence, shell
from hil.controller.cli.board.options import add_board_place, choose_place, connect_agent, open_shell, print_checks
from hil.controller.cli.board.peak import measure_peak
from hil.controller.cli.board.registration import add, remove, rename
from hil.controller.cli.board.trust import trust
from hil.controller.cli.commands import group
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_runtimes, complete_types
from hil.core.runtimes import RUNTIMES
from hil.errors import EXIT_BOARD, EXIT_OK, UsageError


@group(epilog="Example: hil board check root@192.168.7.2")
def board() -> None:
    """Add, list, check, set up and reset boards."""


@board.command("list", epilog="Example: hil board list --json")
@json_option
def list_boards(as_json: bool) -> None:
    """List the boards with a config, and whether each config is trusted (hil board trust)."""
    from hil.controller.records.commands.boards import BoardList, ListedBoard
    from hil.core.boards import list_boards, read_board

    rows = []
    lines = []
    for name, path in sorted(list_boards().items()):
        hw_type, trusted = "?", False
        try:
            found = read_board(path)
            trusted, hw_type, description = found.is_trusted, found.config.hw_type, found.config.description
        except UsageError as error:
            description = error.message
        rows.append(ListedBoard(name=name, hw_type=hw_type, description=description, path=str(path), trusted=trusted))
        mark = "" if trusted or hw_type == "?" else f" (not trusted: hil board show {name})"
        lines.append(f"{name:16} {hw_type:12} {description}{mark}")
    answer(as_json, BoardList(boards=rows), *lines)


@board.command(epilog="Example: hil board show sim-f16")
@click.argument("name", shell_complete=complete_types)
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a board's config, trusted or not."""
    from hil.controller.devices.choosing.board_resolver import is_address, is_without_config
    from hil.controller.records.base import make_record
    from hil.controller.records.commands.boards import BoardDescription, BoardSettings
    from hil.core.boards import find_board, read_board

    if is_without_config(name):
        what = "an address" if is_address(name) else "a host of ~/.ssh/config"
        hint = f"hil board info {name} queries the board; hil board show generic prints the config for addresses"
        raise UsageError(f"{name} is {what}, so it has no config", hint=hint)
    config = read_board(find_board(name)).config
    shown = BoardDescription(board=make_record(asdict(config), BoardSettings))
    answer(as_json, shown, config.text.rstrip())


@board.command(epilog="Example: hil board check root@192.168.7.2")
@add_board_place
@click.option(
    "--runtime",
    default="",
    metavar="NAME",
    help=f"Runtime: {', '.join(RUNTIMES)}, ... (default: the board's).",
    shell_complete=complete_runtimes,
)
@json_option
def check(as_json: bool, runtime: str, **settings: Any) -> int:
    """Check a board, and print a fix for every failure.

    Checks the network, login, Python, disk and power meter, and runs a tiny program. Deploys the agent if it is
    missing. Exit code: 0 if no check fails, 4 otherwise. A `warn` is not a failure: timings, disk space or energies may
    be a problem.
    """
    from hil.controller.devices.health import FAIL
    from hil.controller.records.commands.boards import CheckReport
    from hil.controller.workloads.board_checks import check_board

    choice = choose_place(settings)
    done = print_checks(check_board(choice, runtime=runtime, say=print_message), quiet=as_json)
    failed = [one.name for one in done if one.state == FAIL]
    if failed and not as_json:
        print_message(f"FAIL: {', '.join(failed)}")
    code = EXIT_BOARD if failed else EXIT_OK
    return answer(as_json, CheckReport(board=choice.name, ok=not failed, checks=done, exit_code=code))


@board.command(epilog="Example: hil board ping root@192.168.7.2 --count 20")
@add_board_place
@click.option("--count", default=10, show_default=True, type=click.IntRange(1, 100_000), help="Round trips.")
@json_option
def ping(as_json: bool, count: int, **settings: Any) -> None:
    """Measure round trips to a board's agent, and the clock error. Without an agent, measure commands over SSH."""
    from hil.controller.devices.choosing.board_resolver import read_capabilities
    from hil.controller.records.commands.boards import ClockError, PingReport, RoundTripTimes
    from hil.core import clock

    choice = choose_place(settings)
    fit = None
    if not read_capabilities(choice).clock:
        trips = []
        with open_shell(choice) as there:
            for _ in range(count):
                start = time.monotonic_ns()
                there.run(["true"])
                trips.append(time.monotonic_ns() - start)
    else:
        with connect_agent(choice) as client:
            client.describe()
            pings = client.pings(count)
        trips = [one.round_trip_ns for one in pings]
        fit = clock.fit(pings)
    times = min(trips), round(statistics.median(trips)), max(trips)
    report = PingReport(board=choice.name, count=count, round_trip=RoundTripTimes(*times))
    if fit:
        report.clock = ClockError(offset_ns=fit.offset_ns, error_ns=fit.error_ns)
    least, median, most = (f"{one / 1e6:.2f} ms" for one in times)
    answer(
        as_json,
        report,
        f"{choice.name}: {count} round trips, min {least}, median {median}, max {most}",
        *([f"clock error at most {fit.error_ns / 1e3:.0f} us"] if fit else ()),
    )


@board.command(epilog="Example: hil board info root@192.168.7.2 --json")
@add_board_place
@json_option
def info(as_json: bool, **settings: Any) -> None:
    """Show a board: machine, system, runtimes, clocks, temperatures and current user."""
    from hil.controller.pipeline.boards.board_pool import BoardPool
    from hil.controller.records.commands.boards import BoardInfo
    from hil.controller.workloads.board_checks import remove_power_hooks

    choice = choose_place(settings)
    with BoardPool("hil board info", say=print_message, needs_device=False) as pool:
        found = pool.session(remove_power_hooks(choice)).board
        info = found.info
        fingerprint = found.shell.fingerprint if found.shell else ""
    lines = [f"{key:12} {value}" for key, value in _list_rows(info, fingerprint) if value]
    answer(as_json, BoardInfo(board=choice.name, host_key=fingerprint, info=info), *lines)


def _list_rows(info: dict[str, Any], fingerprint: str) -> list[tuple[str, str]]:
    """Return labelled values that describe a board. Unknown values are ""."""
    from hil.controller.workloads.board_checks import describe_runtime

    machine: dict[str, Any] = info.get("machine", {})
    memory = int(info.get("memory_limit_bytes") or machine.get("memory_bytes", 0))
    holder = info.get("holder", {})
    cores = f"{machine['cores']} cores" if machine.get("cores") else ""
    rows = [
        ("board", f"{info.get('name', '')} ({info.get('board_id', '')})"),
        ("host key", fingerprint),
        ("agent", f"hil {info['agent_version']}, protocol {info['protocol']}" if "protocol" in info else "none"),
        ("build", info.get("build", "")),
        ("machine", ", ".join(filter(None, (_join_values(machine, "arch", "cpu_model"), cores)))),
        ("cpu parts", " ".join(machine.get("cpu_parts", ()))),
        ("compile for", _describe_target(machine)),
        ("system", ", ".join(filter(None, (_join_values(machine, "system", "kernel"), machine.get("libc", ""))))),
        ("python", machine.get("python", "")),
        ("boot", machine.get("boot_id", "")),
        ("memory", f"{memory / 2**20:.0f} MiB per program" if memory else ""),
    ]
    for one in info.get("runtimes", ()):
        state = f"does not work: {one['error']}" if one.get("error") else describe_runtime(one)
        rows.append(("runtime", f"{one['name']} {state}".rstrip()))
    for part in info.get("stack", ()):
        rows.append(("stack", f"{part['name']}: {part['version'] or 'unknown'}"))
    for one in info.get("readings", ()):
        value = one.get("text") or round(one.get("value", 0.0), 1)
        rows.append(("reading", f"{one['name']}: {value} {one.get('unit', '')}".rstrip()))
    if holder:
        who = f"{holder.get('owner', '')} ({holder.get('purpose', '')})"
        rows.append(("in use by", f"{who} for {holder.get('held_s', 0):.0f} s"))
    return rows


def _join_values(machine: dict[str, Any], *names: str) -> str:
    return " ".join(str(machine[name]) for name in names if machine.get(name))


def _describe_target(machine: dict[str, Any]) -> str:
    from hil.controller.backends.targets import choose_iree_target

    try:
        return choose_iree_target(machine).description
    except UsageError:
        return ""


for command in (
    *(add, remove, rename, check, ping, info, logs, console, shell, reset, recover, provision, deploy, clean),
    *(reset_fence, trust, list_devices, measure_peak),
):
    board.add_command(command)

"""Checks of `hil board check`, with results and hints for the fix."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.health import FAIL, PASS, SKIP, WARN, check_login, parse_firmware_bits
from hil.controller.records.commands.boards import BoardCheck, CheckState
from hil.core.board_config import Power, Recover
from hil.core.scratch import make_temporary_folder
from hil.core.text import TextSink
from hil.errors import BoardBusy, BoardError, BoardUnfit, HilError, NotRun, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board import Board
    from hil.controller.devices.deploy.probe import Seen
    from hil.controller.devices.ssh.shell import Shell
    from hil.controller.pipeline.boards.board_session import BoardSession

_CONNECT_SECONDS = 10.0
_DISK_MIB = 200
_MEMORY_MIB = 64
_CLOCK_SECONDS = 2.0
_PROGRAM_SECONDS = 60.0


def check_board(choice: BoardChoice, *, runtime: str = "", say: TextSink = lambda text: None) -> Iterator[BoardCheck]:
    """Check a board, from the connection to a run of a model.

    Stop after a ``fail`` that makes further checks impossible.
    """
    from hil.controller.devices.ssh.address import is_ssh_address

    where = choice.address or choice.config.connection.address
    if is_ssh_address(where):
        config = choice.config
        opened = yield from check_login(where, config.connection, board=choice.name, base=config.path.parent)
        if opened is None:
            return
        with opened as shell:
            try:
                yield from _place(shell, choice)
            except BoardError as error:
                yield BoardCheck("system", FAIL, error.message, error.hint or error.detail)
                return
    yield from _check_agent(choice, runtime, say)


def remove_power_hooks(choice: BoardChoice) -> BoardChoice:
    """Return the board without power hooks, so that checks never reset it."""
    return replace(choice, config=replace(choice.config, power=Power(), recover=Recover()))


def read_board_id(choice: BoardChoice) -> str:
    """Connect to a board, and return its id; "" if the board does not report it. Raises BoardError."""
    from hil.controller.pipeline.boards.board_pool import BoardPool

    with BoardPool("hil board provision", wait_s=_CONNECT_SECONDS, needs_device=False) as pool:
        return str(pool.session(remove_power_hooks(choice)).board.info.get("board_id", ""))


# ---- checks over ssh


def _place(shell: Shell, choice: BoardChoice) -> Iterator[BoardCheck]:
    from hil.controller.devices.deploy.probe import ask

    seen = ask(shell, "probe", choice.config.connection.folder, "", board=choice.name)
    yield BoardCheck("system", PASS, f"{seen.system} on {seen.machine}")
    noexec = f"programs cannot run in {seen.folder}: the file system is mounted noexec" if seen.noexec else ""
    fix = "set a different directory in the config: [connection] folder"
    yield _make_check("folder", FAIL, seen.unusable or noexec, seen.folder, fix)
    if seen.free_bytes is not None:
        free = f"{seen.free_bytes / 2**20:.0f} MiB free in {seen.folder}"
        low = f"{free}; the agent requires about 75 MiB" if seen.free_bytes < _DISK_MIB * 2**20 else ""
        fix = "free disk space, or set a different directory in the config: [connection] folder"
        yield _make_check("disk", WARN, low, free, fix)
    shared = shell.run(["sh", "-c", "test -w /dev/shm && df -Pk /dev/shm | tail -n 1"], check=False).text.split()
    there = len(shared) > 3 and re.fullmatch("[0-9]{1,15}", shared[3])
    found = f"{int(shared[3]) / 1024:.0f} MiB free in /dev/shm" if there else ""
    fix = "mount -t tmpfs tmpfs /dev/shm; some runtimes require it"
    yield _make_check("shared memory", WARN, "" if there else "/dev/shm is missing or not writable", found, fix)
    yield _check_python(seen, choice)


def _make_check(name: str, state: CheckState, wrong: str, fine: str, fix: str) -> BoardCheck:
    """Return a passing check if ``wrong`` is empty, else a check with ``state`` and the hint."""
    return BoardCheck(name, state, wrong, fix) if wrong else BoardCheck(name, PASS, fine)


def _check_python(seen: Seen, choice: BoardChoice) -> BoardCheck:
    """Check that the board has a Python that can run the agent."""
    from hil.controller.devices.choosing.board_resolver import read_capabilities
    from hil.controller.devices.deploy.ensure import list_usable_interpreters
    from hil.controller.devices.deploy.packages import NoAgentHere

    if not read_capabilities(choice).python:
        return BoardCheck("python", SKIP, "no agent configured")
    try:
        usable = list_usable_interpreters(seen)
    except NoAgentHere as error:
        return BoardCheck("python", WARN, "; ".join([error.message, *error.detail.splitlines()]), error.hint)
    return BoardCheck("python", PASS, ", ".join(one.text for one in usable))


def _check_agent(choice: BoardChoice, runtime: str, say: TextSink) -> Iterator[BoardCheck]:
    from hil.controller.pipeline.boards.board_pool import BoardPool

    start = time.monotonic()
    with BoardPool("hil board check", wait_s=_CONNECT_SECONDS, say=say, needs_device=False) as pool:
        try:
            session = pool.session(remove_power_hooks(choice), runtimes=(runtime,))
        except BoardError as error:
            yield BoardCheck("agent", FAIL, error.message, error.hint or error.detail)
            return
        board = session.board
        asked = time.time_ns()
        yield BoardCheck("agent", *_describe_agent(board.info, time.monotonic() - start))
        yield from check_info(board.info, asked)
        yield from _check_meter(board)
        usable = yield from _check_runtime(board.info, runtime or board.config.runtime)
        if usable and (yield from _check_command(board)):
            yield _check_program(session, runtime)[0]


def _check_meter(board: Board) -> Iterator[BoardCheck]:
    """Check the power meter, if any. Its modules take milliseconds to import."""
    if board.meter.is_set or board.config.connection.host_meter:
        from hil.controller.workloads.meter_check import check_meter

        yield from check_meter(board)


def find_inference_fault(
    choice: BoardChoice, *, runtime: str = "", timeout_s: float = _PROGRAM_SECONDS
) -> HilError | None:
    """Run a tiny model on a board, as `hil run` does. Return the error, or None if the outputs are correct.

    Args:
        timeout_s: Timeout for the load and for the run, in seconds.
    """
    from hil.controller.pipeline.boards.board_pool import BoardPool

    with BoardPool("hil board recover", wait_s=_CONNECT_SECONDS, needs_device=False) as pool:
        try:
            session = pool.session(remove_power_hooks(choice), runtimes=(runtime,))
        except BoardError as error:
            return error
        return _check_program(session, runtime, timeout_s)[1]


def _describe_agent(info: Mapping[str, Any], took: float) -> tuple[CheckState, str]:
    if missing := info.get("not_measured"):
        return SKIP, f"no agent: a command runs the programs; not measured: {', '.join(missing)}"
    build = f", build {info['build'][:12]}" if info.get("build") else ""
    version = info.get("machine", {}).get("python", "")
    python = f" on Python {version}" if version else ""  # a microcontroller has no Python
    return PASS, f"hil {info.get('agent_version', '')}{build}{python}, responds after {took:.1f} s"


def check_info(info: Mapping[str, Any], now_ns: int) -> Iterator[BoardCheck]:
    """Yield checks of an agent's board description. Skip readings that the board does not report.

    Args:
        now_ns: this machine's wall clock at the time of the description, in nanoseconds since 1970.
    """
    if "wall_ns" in info:
        off = (int(info["wall_ns"]) - now_ns) / 1e9
        how = (
            f"{abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this machine's"
            if abs(off) >= _CLOCK_SECONDS
            else ""
        )
        fix = "set the clock (date -s, NTP): TLS and file dates depend on it, hil's timings do not"
        yield _make_check("clock", WARN, how, "matches this machine", fix)
    readings = {one["name"]: one for one in info.get("readings", ())}
    governors = {name.split()[0]: one.get("text", "") for name, one in readings.items() if name.endswith(" governor")}
    if governors:
        found = ", ".join(f"{cpu} {governor}" for cpu, governor in governors.items())
        slow = found if "powersave" in governors.values() else ""
        fix = "echo performance > /sys/devices/system/cpu/cpufreq/policyN/scaling_governor, on the board"
        yield _make_check("governor", WARN, slow, found, fix)
    cooling = [one for name, one in readings.items() if name.startswith("cooling_device") and one.get("value")]
    hot = [f"{one['name']} at step {one['value']:.0f}" for one in cooling]
    if (parse_firmware_bits(bits := readings.get("firmware throttling", {}).get("text", "")) or 0) & 0xF:
        hot.append(f"firmware throttling {bits}")
    if hot:
        yield BoardCheck("throttling", WARN, ", ".join(hot), "cool the board, and use a stronger power supply")
    if "free memory" in readings:
        free = float(readings["free memory"].get("value", 0.0))
        found = f"{free:.0f} MiB free"
        limit = int(info.get("memory_limit_bytes", 0)) / 2**20
        if 0 < limit < free:
            found = f"{limit:.0f} MiB (limit of the agent)"
        yield _make_check(
            "memory", WARN, found if free < _MEMORY_MIB else "", found, "stop other programs on the board"
        )


def _check_runtime(info: Mapping[str, Any], wanted: str) -> Generator[BoardCheck, None, bool]:
    """Yield checks of the board's runtimes. Return whether the wanted runtime is usable."""
    found = {one["name"]: one for one in info.get("runtimes", ())}
    usable = False
    for name, one in found.items():
        if error := one.get("error"):
            fix = f"hil board deploy ADDR --runtime {name}, or install it on the board manually"
            yield BoardCheck(f"runtime {name}", FAIL if name == wanted else SKIP, f"cannot be used: {error}", fix)
        else:
            usable = usable or name == wanted
            yield BoardCheck(f"runtime {name}", PASS, describe_runtime(one))
    if wanted not in found:
        fix = f"hil board deploy ADDR --runtime {wanted}, or use an installed runtime: {', '.join(found)}"
        yield BoardCheck(f"runtime {wanted}", FAIL, "not available on the board", fix)
    return usable


def _check_command(board: Board) -> Generator[BoardCheck, None, bool]:
    """Check that the board has the configured program, if any. Return False if the program does not exist."""
    try:
        if place := board.client.find_command():
            yield BoardCheck("command", PASS, place)
    except HilError as error:
        yield BoardCheck("command", FAIL, error.message, error.hint)
        return False
    return True


def describe_runtime(runtime: Mapping[str, Any]) -> str:
    """Return the version and devices of a runtime from Describe, or the command of an agentless board."""
    devices, command = ", ".join(runtime.get("devices", ())), runtime.get("command", "")
    words = (runtime.get("version"), devices and f"on {devices}", command and f"by the command {command}")
    return " ".join(filter(None, words))


# ---- a program


def _check_program(
    session: BoardSession, runtime: str, timeout_s: float = _PROGRAM_SECONDS
) -> tuple[BoardCheck, HilError | None]:
    """Compile, push, run and compare a tiny model, as `hil run` does. Return the check, and the error if any."""
    from hil.controller.pipeline.runner import Runner
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.storage.run_context import open_context
    from hil.core.results import Outcome
    from hil.core.runtimes import RUNTIMES, can_load_onnx

    wanted = runtime or session.board.config.runtime
    if not can_load_onnx(wanted):
        found = f"no test program for runtime {wanted}"
        return BoardCheck("program", SKIP, found, "test the board with: hil run MODEL"), None
    with make_temporary_folder("hil-") as folder, open_context() as context:
        (Path(folder) / "logs").mkdir()
        runner = Runner(context, lasting=False)
        try:
            case = runner.begin(
                write_tiny_model(Path(folder)), Options(runtime=runtime, timeout=timeout_s), Path(folder)
            )
            case = runner.run_on_board(case, session)
        except UsageError as error:
            return BoardCheck("program", FAIL, error.message, error.hint), error
    if case.outcome is Outcome.PASS:
        return BoardCheck("program", PASS, "a tiny model runs and returns correct outputs"), None
    if case.outcome is Outcome.COMPILE_ERROR and wanted not in RUNTIMES:
        # A package's compiler may not support the operator of the model. This is not the board's fault.
        found = f"the compiler for {wanted} refuses hil's test program: {case.reason}"
        return BoardCheck("program", SKIP, found, "test the board with: hil run MODEL"), None
    if isinstance(case.error, NotRun):
        return BoardCheck("program", SKIP, case.reason, case.error.hint), None
    if isinstance(case.error, BoardBusy):
        return BoardCheck("program", SKIP, case.reason, "retry when the board is free"), case.error
    found = f"{case.outcome and case.outcome.value}: {case.reason}"
    wrong = case.error or BoardUnfit(f"a tiny model returns wrong outputs: {case.reason}")
    return BoardCheck("program", FAIL, found, wrong.hint), wrong


def write_tiny_model(folder: Path) -> Path:
    """Write a model that any board can run. Return the path."""
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [16]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"], "twice")], "tiny", [x], [y])
    path = folder / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path

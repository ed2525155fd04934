"""Measure the agent's disk space and memory on an aarch64 board.

The board is a whole emulated machine (qemu-system-aarch64), so that its kernel counts only pages of the board's
processes, without an emulator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import common
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.deploy import probe
from tools.virtual_board import VirtualBoard, start

DISK_BAR_MB = 75.0
MEMORY_BAR_MB = 60.0
SETTLE_S = 3.0
# After a minute without a session, the agent frees the memory of spare workers.
IDLE_S = 90.0
# Prints two numbers in KiB for each hil process: resident memory, and proportional memory (PSS).
MEMORY = """
for place in /proc/[0-9]*; do
    case $(tr '\\0' ' ' 2>/dev/null <"$place/cmdline") in
    /usr/bin/python*' -m hil.agent'*)
        awk '/^Rss:/ {r=$2} /^Pss:/ {p=$2} END {if (r) print r, p}' "$place/smaps_rollup" ;;
    esac
done 2>/dev/null
"""


def memory_mb(board: VirtualBoard) -> list[tuple[float, float]]:
    """Return the resident and the proportional memory of each process of hil in MB, the largest first."""
    lines = board.run(["sh", "-c", MEMORY], check=True).stdout.splitlines()
    return sorted((tuple(int(word) * 1024 / 1e6 for word in line.split()) for line in lines), reverse=True)


def footprint_rows(
    folder: Path, choice_of: Callable[[VirtualBoard], BoardChoice], notes: list[str]
) -> list[common.Row]:
    """Return rows for the agent with its IREE runtime, just after deployment and after an idle time."""
    print("starting an emulated machine ...", file=sys.stderr)
    board = start(folder / "machine", name="machine", arch="aarch64", system=True)
    try:
        with connect_board(replace(choice_of(board), purpose="benchmark")) as opened:
            assert opened.shell
            opened.take()
            time.sleep(SETTLE_S)
            used = probe.read_status(opened.shell, "").used_bytes / 1e6
            held = memory_mb(board)
        deadline = time.monotonic() + IDLE_S
        while len(idle := memory_mb(board)) > 1 and time.monotonic() < deadline:
            time.sleep(SETTLE_S)
    finally:
        board.down()

    def row(case: str, value: float, bar: float) -> common.Row:
        return common.Row(case, value, "MB", "the bar", bar, value / bar, "<= 1.0")

    notes.append(
        "memory as reported by the emulated machine's kernel for hil's processes "
        f"({len(held)} in a session, {len(idle)} idle), shared pages counted once"
    )
    return [
        row("agent on an aarch64 board: disk, bytecode included", used, DISK_BAR_MB),
        row("agent on an aarch64 board: memory, idle for a minute", sum(pss for _, pss in idle), MEMORY_BAR_MB),
        common.Row("resident then (shared libraries counted whole)", sum(rss for rss, _ in idle), "MB"),
        common.Row("memory in a session, no program loaded", sum(pss for _, pss in held), "MB"),
    ]

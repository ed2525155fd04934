"""Measure a board over SSH, relative to scp and ssh without an agent. The board is a virtual board with a real sshd.

- 50 small layer tests, compiled in advance. The rivals use scp and ssh: with a connection per command, with a master
  connection per test, and with one master connection. The time includes connecting, comparing and closing. All outputs
  are checked.
- Opening a session if the agent is installed; an additional test; a warm command; a whole `hil run` of a model that is
  compiled and already on the board.
- 200 MB to the board's disk, relative to scp through an open master; 128 MiB to and from memory through the tunnel,
  relative to a plain socket through `ssh -L`.
- Disk space and memory of the agent on an aarch64 board with a separate kernel.

Run it as `python -m benchmarks.ssh`; for a short run, add `--rounds 0 --sessions 5 --bulk 2 --footprint 0`. Virtual
boards need Linux, root, apt-get and OpenSSH's client.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import common
from benchmarks.ssh_bulk import bulk_rows
from benchmarks.ssh_footprint import footprint_rows
from benchmarks.ssh_layers import choice_for, make_layers, one_by_one, one_test, renew, together
from benchmarks.ssh_rivals import Rival
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import open_board
from tools.virtual_board import VirtualBoard, start


def choice_of(board: VirtualBoard) -> BoardChoice:
    """Return the board as `--board` selects it, with the device that the rivals use."""
    return choice_for(board.address, board.identity, board.known_hosts)


def in_turn(cases: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Return case -> seconds of each round. A case gets the number of the round; 0 is the warm-up."""
    done = dict.fromkeys(cases, 0)

    def measure(name: str) -> list[float]:
        done[name] += 1
        return [cases[name](done[name] - 1)]

    return common.interleave({name: functools.partial(measure, name) for name in cases}, rounds)


def faster(case: str, mine: Sequence[float], rival: str, theirs: Sequence[float], bar: str) -> common.Row:
    """Return a row in seconds. Its ratio is how many times hil is faster."""
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    return common.Row(case, statistics.median(mine), "s", rival, statistics.median(theirs), ratio, bar)


def limit(case: str, seconds: float, bar_s: float, rival: str = "the bar") -> common.Row:
    """Return a row in milliseconds, relative to its limit."""
    return common.Row(case, seconds * 1e3, "ms", rival, bar_s * 1e3, seconds / bar_s, "<= 1.0")


def test_rows(board: VirtualBoard, folder: Path, tests: int, rounds: int) -> list[common.Row]:
    """Return rows for many small tests, relative to the rivals."""
    choice = choice_of(board)
    layers = make_layers(folder / "layers", tests)
    together(choice, layers[:1])  # install the agent
    (folder / "rival").mkdir()
    rival = Rival(board, folder / "rival")
    turn = 0

    def fresh(way: Callable[[], float]) -> float:
        """Run the tests with programs that are new to the board. The agent was used within the last minute."""
        nonlocal turn
        turn += 1
        one_by_one(choice, layers[:1])
        renew(layers, turn)
        return way()

    def whole_process() -> float:
        script = [sys.executable, "-m", "benchmarks.ssh_layers", str(folder / "layers")]
        command = [*script, board.address, str(board.identity), str(board.known_hosts)]
        begin = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=common.HERE.parent)
        assert json.loads(done.stdout)["tests"] == tests
        return time.perf_counter() - begin

    ways = {"plain": rival.plain, "master a test": rival.master_a_test, "master kept": rival.master_kept}

    # The warm-up has only one test, because 50 tests of the slow rivals would take a minute.
    def way_of(way: Callable[..., float]) -> Callable[[int], float]:
        return lambda number: way(layers if number else layers[:1])

    got = in_turn(
        {
            "together": lambda _: fresh(lambda: together(choice, layers)),
            "one by one": lambda _: fresh(lambda: one_by_one(choice, layers)),
            "process": lambda _: fresh(whole_process),
            **{name: way_of(way) for name, way in ways.items()},
        },
        rounds,
    )
    named = (
        ("plain", "scp, ssh, scp a test", ">= 50"),
        ("master a test", "a master a test", ">= 20"),
        ("master kept", "one master kept", ">= 3"),
    )
    cases = (
        (f"{tests} layer tests, connecting included", "together", True),
        ("the same, each program sent on its own", "one by one", True),
        ("the same, a whole Python process", "process", False),
    )
    return [
        faster(case, got[mine], rival, got[name], bar if has_bar else "")
        for case, mine, has_bar in cases
        for name, rival, bar in named
    ]


def session_rows(board: VirtualBoard, folder: Path, rounds: int) -> list[common.Row]:
    """Return rows for opening a session, an additional test, and a command relative to ssh through an open master."""
    choice = choice_of(board)
    layers = make_layers(folder / "more", rounds)
    opening, one_more = [], []
    for layer in layers:
        begin = time.perf_counter()
        with open_board(replace(choice, purpose="benchmark")) as opened:
            opened.take()
            opening.append(time.perf_counter() - begin)
            one_test(opened, layer)
    with open_board(replace(choice, purpose="benchmark")) as opened:
        one_test(opened, layers[0])
        renew(layers, 1)
        for layer in layers:
            begin = time.perf_counter()
            one_test(opened, layer)
            one_more.append(time.perf_counter() - begin)
            time.sleep(0.05)
        assert opened.shell
        shell, rival = opened.shell, Rival(board, folder)
        with rival.master() as through:
            got = common.interleave(
                {
                    "hil": lambda: common.timed(lambda: shell.run(["true"]), 5),
                    "ssh": lambda: common.timed(lambda: rival.ssh("true", through=through), 5),
                },
                rounds,
            )
    case = "warm command"
    model = common.HERE.parent / "examples" / "digits" / "digits_cnn.onnx"
    place = ["--identity", board.identity, "--known-hosts", board.known_hosts, "--out", folder / "runs"]
    command = [sys.executable, "-m", "hil", "run", model, "--board", board.address, *place]

    def whole() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    whole()
    return [
        limit("hil run, all warm, a whole process", statistics.median(common.timed(whole, rounds // 2)), 0.6),
        limit("session open, the agent is there", statistics.median(opening), 0.7),
        limit("one more test on an open session", statistics.median(one_more), 0.015),
        limit(case, statistics.median(got["hil"]), 0.010),
        common.beside(case, got["hil"], "ssh through an open master", got["ssh"], 1e3, "ms", ""),
    ]


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, tests=50, rounds=3, sessions=20, bulk=7, footprint=1)
    rows: list[common.Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as place:
        folder = Path(place)
        board = start(folder / "board", name="bench", disk_mb=4096)
        try:
            if asked.rounds:
                rows += test_rows(board, folder, asked.tests, asked.rounds)
            for name in ("session", "bulk"):
                (folder / name).mkdir()
            if asked.sessions:
                rows += session_rows(board, folder / "session", asked.sessions)
            if asked.bulk:
                rows += bulk_rows(board, choice_of(board), folder / "bulk", asked.bulk)
        finally:
            board.down()
        if asked.footprint:
            rows += footprint_rows(folder, choice_of, notes)
    notes += [
        "x86_64 virtual board, OpenSSH on both sides; rivals with OpenSSH's defaults but for `gcm`: aes128-gcm",
        "a ratio of tests shows how many times faster hil is; every program is new to the board",
    ]
    common.show("ssh", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()

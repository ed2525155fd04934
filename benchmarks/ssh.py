"""A board over SSH, beside what people do without an agent, against a real sshd: a virtual board on this machine.

- 50 small layer tests, compiled beforehand, beside scp and ssh: on a connection for each command, through a master
  opened for every test, through one master. Connecting, comparing and closing count; every output is checked.
- Opening a session where the agent is there; one more test; a warm command; a whole `hil run` of a model that is
  compiled and on the board.
- 200 MB to the board's disk, beside scp through an open master; 128 MiB to and from memory through the tunnel, beside a
  bare socket through an `ssh -L`.
- What the agent takes of an aarch64 board's disk and memory, on a machine with a kernel of its own.

Run as `python -m benchmarks.ssh`; a short form is `--rounds 0 --sessions 5 --bulk 2 --footprint 0`.
Needs what virtual boards need: Linux, root, apt-get, OpenSSH's client.
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
    """The board as `--board` names it, with the device that the rivals use."""
    return choice_for(board.address, board.identity, board.known_hosts)


def in_turn(cases: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Each case's seconds in every round; a case is told the round's number, the warm-up's is 0."""
    done = dict.fromkeys(cases, 0)

    def measure(name: str) -> list[float]:
        done[name] += 1
        return [cases[name](done[name] - 1)]

    return common.interleave({name: functools.partial(measure, name) for name in cases}, rounds)


def faster(case: str, mine: Sequence[float], rival: str, theirs: Sequence[float], bar: str) -> common.Row:
    """A row of seconds, whose ratio is how many times faster hil is."""
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
    return common.Row(case, statistics.median(mine), "s", rival, statistics.median(theirs), ratio, bar)


def limit(case: str, seconds: float, bar_s: float, rival: str = "the bar") -> common.Row:
    """A row of milliseconds beside its bar."""
    return common.Row(case, seconds * 1e3, "ms", rival, bar_s * 1e3, seconds / bar_s, "<= 1.0")


def test_rows(board: VirtualBoard, folder: Path, tests: int, rounds: int) -> list[common.Row]:
    """Many small tests, beside the rivals."""
    choice = choice_of(board)
    layers = make_layers(folder / "layers", tests)
    together(choice, layers[:1])  # puts the agent there
    (folder / "rival").mkdir()
    rival = Rival(board, folder / "rival")
    turn = 0

    def fresh(way: Callable[[], float]) -> float:
        """A way with programs that the board has not seen; the agent was used within the last minute."""
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

    # A warm-up of 50 of the slow ones would be a minute of nothing.
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
    """Opening a session; one more test on it; a command, beside ssh's through an open master."""
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

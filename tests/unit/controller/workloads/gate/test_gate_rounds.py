"""The file of rounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hil.controller.workloads.gate.comparing.rounds import ROUNDS, RoundsFile, RoundsKey

KEY = RoundsKey("5bbbbd3b1b49", "blake3:1", "run-1", "a board, with comma")


@pytest.fixture
def rounds(tmp_path: Path) -> RoundsFile:
    (tmp_path / "gate-2").mkdir()
    return RoundsFile(tmp_path / "gate-2")


def test_read_returns_appended_rounds(rounds: RoundsFile) -> None:
    other = RoundsKey("5bbbbd3b1b49", "blake3:1", "run-2", "orin")
    for key, value in ((KEY, 0.1), (other, -0.25), (KEY, 1 / 3)):
        rounds.append(key, value)
    assert rounds.read() == {KEY: [0.1, 1 / 3], other: [-0.25]}


def test_read_ignores_incomplete_last_line(rounds: RoundsFile) -> None:
    rounds.append(KEY, 0.5)
    with (rounds.folder / ROUNDS).open("a") as file:
        file.write("5bbbbd3b1b49,run-1")
    assert rounds.read() == {KEY: [0.5]}


@pytest.mark.parametrize("line", ["a,b,c,d,much", "a,b,1.0", "a,b,c,d,e,1.0", "a,b,c,d,nan", "", "\0", '"a,b'])
def test_read_ignores_invalid_lines(rounds: RoundsFile, line: str) -> None:
    (rounds.folder / ROUNDS).write_text(f"{line}\n")
    rounds.append(KEY, 0.5)
    assert rounds.read() == {KEY: [0.5]}


def test_nan_discards_rounds_of_measurement(rounds: RoundsFile) -> None:
    other = RoundsKey("5bbbbd3b1b49", "blake3:1", "run-2", "orin")
    for key, value in ((KEY, 0.1), (other, -0.25), (KEY, math.nan), (KEY, 0.2)):
        rounds.append(key, value)
    assert rounds.read() == {KEY: [0.2], other: [-0.25]}


def test_append_replaces_incomplete_line(rounds: RoundsFile) -> None:
    """Of 0.0123, a full disk may have kept 0.0, which is another number."""
    rounds.append(KEY, 0.5)
    with (rounds.folder / ROUNDS).open("a") as file:
        file.write("5bbbbd3b1b49,blake3:1,run-1,orin,0.0")
    rounds.append(KEY, 0.25)
    assert rounds.read() == {KEY: [0.5, 0.25]}


def test_find_earlier_reads_other_gates_of_board(rounds: RoundsFile) -> None:
    for name, value in (("gate-1", 0.1), ("gate-0", 0.2)):
        folder = rounds.folder.parent / name
        folder.mkdir()
        RoundsFile(folder).append(KEY, value)
        RoundsFile(folder).append(RoundsKey("s", "o", "r", "orin"), 9.0)
    rounds.append(KEY, 0.3)
    (rounds.folder.parent / "gate-1" / ROUNDS).open("a").close()
    assert list(rounds.find_earlier(KEY.board)) == [[0.1], [0.2]]

"""Faults of an emulated serial line."""

from __future__ import annotations

import random

import pytest

from tools.virtual_board.serial_bridge import LineDamage, LineFaults

DATA = random.Random(0).randbytes(64 * 1000)


def spoil(faults: str, portion: int) -> tuple[bytes, list[float]]:
    """Return what arrives of the data in portions of this size, and the waiting times."""
    damage, waits = LineDamage("seed"), []
    chosen = LineFaults.parse(faults)
    parts = [DATA[start : start + portion] for start in range(0, len(DATA), portion)]
    return b"".join(damage.apply(part, chosen, waits.append) for part in parts), waits


@pytest.mark.parametrize("faults", ["loss=0.1", "flip=0.1", "repeat=0.1", "delay=0.1", "loss=0.1,flip=0.2,repeat=0.3"])
def test_faults_do_not_depend_on_portions(faults: str) -> None:
    assert spoil(faults, 1) == spoil(faults, 4096) == spoil(faults, 100)


@pytest.mark.parametrize(("faults", "change"), [("loss=0.1", -64), ("repeat=0.1", 64)])
def test_probability_counts_blocks_of_64_bytes(faults: str, change: int) -> None:
    arrived, _ = spoil(faults, 37)
    assert 70 < (len(arrived) - len(DATA)) / change < 130


def test_repeated_block_follows_the_first() -> None:
    arrived, _ = spoil("repeat=1", 64)
    assert arrived[:256] == DATA[:64] * 2 + DATA[64:128] * 2


def test_flip_changes_one_bit_of_a_block() -> None:
    arrived, _ = spoil("flip=1", 5)
    for start in range(0, len(DATA), 64):
        changed = int.from_bytes(DATA[start : start + 64], "big") ^ int.from_bytes(arrived[start : start + 64], "big")
        assert changed.bit_count() == 1


def test_delay_changes_no_byte() -> None:
    arrived, waits = spoil("delay=0.1", 64)
    assert arrived == DATA
    assert 70 < len(waits) < 130

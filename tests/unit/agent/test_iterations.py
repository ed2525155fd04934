"""The outputs of a call's runs are compared byte by byte, or in blocks if they are large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hil.agent.ipc import Arena
from hil.agent.iterations import BLOCK_BYTES, FULL_BYTES, MAX_ANSWERS, MAX_KEPT, AnswerLog
from hil.core.tensors import Array, from_bytes, to_bytes

NAN, OTHER_NAN = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)


def logged(runs: Sequence[Sequence[Array]]) -> tuple[AnswerLog, Arena]:
    arena = Arena()
    log = AnswerLog(arena, [f"y{number}" for number in range(len(runs[0]))], len(runs))
    for arrays in runs:
        log.add(arrays)
    return log, arena


def counts(log: AnswerLog) -> list[tuple[int, int]]:
    return [(runs, first) for runs, first, _ in log.record()["answers"]]


def kept(log: AnswerLog, arena: Arena, number: int) -> list[Array]:
    entries: list[dict[str, Any]] = log.record()["answers"][number][2]
    view = arena.view(log.size, grow=False)
    return [from_bytes(view[one["at"] : one["at"] + one["bytes"]], one["dtype"], one["shape"]) for one in entries]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32([1, 2]), np.float32([1, 3])),
        (np.float32([NAN]), np.float32([OTHER_NAN])),
        (np.float32(0.0), np.float32(-0.0)),
        (np.array([True, False]), np.array([True, True])),
        (np.array(["a", "bc"], object), np.array(["ab", "c"], object)),
        (np.array([1, 2], ml_dtypes.int4), np.array([1, -2], ml_dtypes.int4)),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 4], ml_dtypes.bfloat16)),
        (np.zeros((2, 3), np.int8), np.zeros((3, 2), np.int8)),
        (np.zeros(4, np.int8), np.zeros(4, np.uint8)),
        (np.zeros((0, 3), np.int8), np.zeros((3, 0), np.int8)),
        (np.arange(6, dtype=np.int16).reshape(2, 3).T, np.arange(6, dtype=np.int16).reshape(3, 2)),
    ],
)
def test_output_log_distinguishes_outputs_by_bits(one: Array, other: Array):
    log, arena = logged([[one], [one.copy()], [other], [one]])
    assert counts(log) == [(3, 0), (1, 2)] and log.record()["differing"] == [0]
    assert not log.is_sampled and log.others == 0
    for number, array in enumerate((one, other)):
        (found,) = kept(log, arena, number)
        assert (found.dtype, found.shape) == (array.dtype, array.shape) and to_bytes(found) == to_bytes(array)


def test_output_log_lists_indices_of_differing_outputs():
    same, one, other = np.zeros(3), np.ones(3), np.full(3, 2.0)
    log, _ = logged([[same, one, same], [same, other, same]])
    assert log.record()["differing"] == [1]


def test_output_log_copies_array_reused_by_next_run():
    array = np.zeros(4, np.float32)
    arena = Arena()
    log = AnswerLog(arena, ["y"], 3)
    for value in (1, 1, 2):
        array[:] = value
        log.add([array])
    assert counts(log) == [(2, 0), (1, 2)]
    assert kept(log, arena, 0)[0].tolist() == [1] * 4


def test_output_log_counts_variants_beyond_stored_limit():
    runs = [[np.int32([number % 10])] for number in range(30)]
    log, _ = logged(runs)
    assert counts(log) == [(3, number) for number in range(10)]
    assert [entries is not None for *_, entries in log.record()["answers"]] == [True] * MAX_KEPT + [False] * 6


def test_output_log_limits_number_of_variants():
    log, _ = logged([[np.int32([number])] for number in range(MAX_ANSWERS + 7)])
    assert len(counts(log)) == MAX_ANSWERS and log.others == 7


def test_output_log_records_single_run():
    log, _ = logged([[np.zeros(2)]])
    assert counts(log) == [(1, 0)] and log.outputs[0]["name"] == "y0"


LARGE = 3 * FULL_BYTES


def large(place: int = -1) -> Array:
    array = np.zeros(LARGE, np.uint8)
    if place >= 0:
        array[place] = 1
    return array


def test_output_log_compares_mebibyte_outputs_in_full():
    log, _ = logged([[np.zeros(FULL_BYTES, np.uint8)], [np.eye(1, FULL_BYTES, 12345, np.uint8)[0]]])
    assert counts(log) == [(1, 0), (1, 1)] and not log.is_sampled


def test_output_log_samples_blocks_of_large_outputs_in_turn():
    blocks = LARGE // BLOCK_BYTES
    # A persistent difference is found after every block has had its turn.
    log, _ = logged([[large()], *([large(LARGE // 2)] for _ in range(blocks)), [large()]])
    assert log.is_sampled and len(counts(log)) == 2 and log.record()["differing"] == [0]


def test_output_log_compares_last_run_in_full():
    for place in range(0, LARGE, LARGE // 7):
        log, _ = logged([[large()], [large()], [large(place)]])
        assert counts(log) == [(2, 0), (1, 2)]


def test_output_log_samples_blocks_across_outputs():
    small = [np.zeros(BLOCK_BYTES // 2, np.uint8) for _ in range(64)]
    other = [*small[:-1], np.ones(BLOCK_BYTES // 2, np.uint8)]
    log, _ = logged([small, *[other] * 40, small])
    assert log.is_sampled and log.record()["differing"] == [63]

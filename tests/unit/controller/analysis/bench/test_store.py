"""A bench's folder keeps what was measured, also when a kill cuts a line in two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hil.controller.analysis.bench.stats import Batch
from hil.controller.analysis.bench.store import SampleFile, read_document, read_samples, save_document
from hil.controller.storage.runs import RunStore
from hil.errors import StorageError, UsageError


def batches() -> list[Batch]:
    rng = np.random.default_rng(1)
    return [
        Batch(side, number, 0, np.arange(count) + 2**60, rng.integers(1, 2**40, count))
        for number, (side, count) in enumerate([("A", 3), ("B", 1), ("B", 40), ("A", 2)])
    ]


def store(folder: Path) -> None:
    with SampleFile(folder) as samples:
        for batch in batches():
            samples.append(batch)


def test_samples_come_back_as_they_were(tmp_path):
    store(tmp_path)
    for stored, batch in zip(read_samples(tmp_path), batches(), strict=True):
        assert (stored.side, stored.round, stored.copy) == (batch.side, batch.round, batch.copy)
        np.testing.assert_array_equal(stored.start_ns, batch.start_ns)
        np.testing.assert_array_equal(stored.duration_ns, batch.duration_ns)


def test_a_batch_is_in_the_file_as_soon_as_it_is_appended(tmp_path):
    with SampleFile(tmp_path) as samples:
        for number, batch in enumerate(batches(), 1):
            samples.append(batch)
            assert len(read_samples(tmp_path)) == number


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    store(tmp_path)
    path = tmp_path / "samples.csv"
    path.write_text(path.read_text()[:-3])
    assert [batch.duration_ns.size for batch in read_samples(tmp_path)] == [3, 1, 40, 1]


@pytest.mark.parametrize("text", ["side,round\nA,zwei,drei\n", "side\n1,2,3\n"])
def test_damaged_samples_are_bad_usage_and_no_traceback(tmp_path, text):
    (tmp_path / "samples.csv").write_text(text)
    with pytest.raises(UsageError):
        read_samples(tmp_path)
    with pytest.raises(UsageError):
        read_samples(tmp_path / "nowhere")


def test_a_run_that_is_no_bench_is_told_as_such(tmp_path):
    run = RunStore(tmp_path).create("plain", {})
    with pytest.raises(UsageError, match="is no bench"):
        read_document(run)
    save_document(run, {"sides": [], "ratio": float("nan")})
    assert read_document(run) == {"sides": [], "ratio": "nan"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(StorageError):
        SampleFile(tmp_path / "missing")

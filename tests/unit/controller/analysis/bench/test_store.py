"""A bench directory stores the samples of each batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.bench_boards import read_samples
from support.run_records import bench_record

from hil.controller.analysis.bench.stats import Batch
from hil.controller.analysis.bench.store import read_bench, sample_file
from hil.controller.storage.runs import RunStore, write_json
from hil.errors import StorageError, UsageError


def batches() -> list[Batch]:
    rng = np.random.default_rng(1)
    return [
        Batch(side, number, 0, np.arange(count) + 2**60, rng.integers(1, 2**40, count))
        for number, (side, count) in enumerate([("A", 3), ("B", 1), ("B", 40), ("A", 2)])
    ]


def store(folder: Path) -> None:
    with sample_file(folder) as append:
        for batch in batches():
            append(batch)


def test_samples_round_trip(tmp_path):
    store(tmp_path)
    for stored, batch in zip(read_samples(tmp_path), batches(), strict=True):
        assert (stored.side, stored.round, stored.copy) == (batch.side, batch.round, batch.copy)
        np.testing.assert_array_equal(stored.start_ns, batch.start_ns)
        np.testing.assert_array_equal(stored.duration_ns, batch.duration_ns)


def test_samples_are_stored_on_each_append(tmp_path):
    with sample_file(tmp_path) as append:
        for number, batch in enumerate(batches(), 1):
            append(batch)
            assert len(read_samples(tmp_path)) == number


def test_read_bench_rejects_runs_without_bench(tmp_path):
    run = RunStore(tmp_path).create("plain", {})
    with pytest.raises(UsageError, match="is not a bench"):
        read_bench(run)
    write_json(run.folder / "bench.json", {"sides": []})
    with pytest.raises(UsageError, match="is not a bench"):
        read_bench(run)


def test_read_bench_returns_stored_record(tmp_path):
    run, record = RunStore(tmp_path).create("bench", {}), bench_record()
    write_json(run.folder / "bench.json", record.to_json())
    assert read_bench(run) == record


def test_sample_file_reports_unwritable_directory(tmp_path):
    with pytest.raises(StorageError), sample_file(tmp_path / "missing"):
        pass


def test_samples_contain_counts_and_only_real_times(tmp_path):
    times = np.array([5, 6])
    with sample_file(tmp_path) as append:
        append(Batch("A", 0, 0, times, times, instructions=(70, 80)))
        append(Batch("A", 0, 0, times, times, instructions=(90, 95), is_timed=False))
    rows = (tmp_path / "samples.csv").read_text().splitlines()
    assert rows[0] == "side,round,batch,copy,start_ns,duration_ns,instructions"
    assert rows[1:] == ["A,0,0,0,5,5,70", "A,0,0,0,6,6,80", "A,0,1,0,,,90", "A,0,1,0,,,95"]

"""Results of commands and of pytest in the history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.commands import Ended

from hil.controller.storage.history.store import HistoryStore


def test_runs_and_benches_are_added_with_programs(hil: Callable[..., Ended], doubling: Path, tmp_path: Path) -> None:
    (tmp_path / "hil.toml").write_text("[history]\nauto = true\n")
    words = (doubling, "--runtime", "iree", "--runtime-hw-type", "sim")
    assert "1 of 1 cases" in hil("run", *words, "--iterations", "5").err
    out = tmp_path / "google.json"
    assert "1 of 1 cases" in hil("bench", *words, "--iterations", "20", "--benchmark-out", out).err
    assert hil("history", "add", "latest").out == "added 0 entries, 1 present, 0 programs\n"
    assert hil("history", "import", out, "--board", "sim").code == 0
    with HistoryStore.open(tmp_path / "hil-runs/history") as store:
        entries = {entry.key.kind: entry for entry in store.entries()}
        run, bench, other = (entries[kind] for kind in ("run", "bench", "google-benchmark"))
        assert (run.outcome, run.clock, len(run.samples_ns)) == ("PASS", "board", 4)  # without the cold iteration
        assert bench.iterations == len(bench.samples_ns) == 20
        assert other.samples_ns and other.key.model == "hil bench"
        assert run.program == bench.program
        record = store.program_record(run.program)
        folder = store.program(run.program)
        assert record is not None and folder is not None
        assert (folder / record.main).is_file() and record.runtime == "iree"
        assert "kernel" in run.board.stack

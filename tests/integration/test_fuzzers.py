"""A short run of every fuzzer, with the same inputs each time; and every input that once broke something."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing.engine import looping
from fuzzing.runs import REGRESSIONS, drive, replay
from fuzzing.targets import FUZZERS

# How many inputs each tries here; the others try SOME.
SOME, FEW = 300, {"agent": 25, "gateway": 40, "liar": 20, "onnx": 150, "mlir": 30}
SEED = 16
FOUND = [
    pytest.param(path.parent.name, path, id=f"{path.parent.name}-{path.name}")
    for path in sorted(REGRESSIONS.glob("*/*"))
]


@pytest.mark.parametrize("name", FUZZERS)
def test_a_short_run_breaks_nothing(name: str, tmp_path: Path) -> None:
    fuzzer = FUZZERS[name]
    if lacking := fuzzer.lacking():
        pytest.skip(lacking)
    inputs = FEW.get(name, SOME)
    if fuzzer.confirm is not None:  # what reads them may end its process
        report = drive(fuzzer, tmp_path, seed=SEED, seconds=600.0, inputs=inputs)
        assert not report.failures, [path.read_text() for path in (tmp_path / "failures").glob("*.txt")]
        assert report.inputs >= inputs - report.ended_alone
        return
    with looping(fuzzer, tmp_path, SEED) as loop:
        for number in range(inputs):
            failure = loop.step(number, loop.input(number))
            assert failure is None, failure.text
    assert loop.counts.messages >= inputs and len(loop.counts.kinds) > 1


@pytest.mark.parametrize(("name", "path"), FOUND)
def test_what_broke_something_once_breaks_nothing(name: str, path: Path) -> None:
    if lacking := FUZZERS[name].lacking():
        pytest.skip(lacking)
    failure = replay(FUZZERS[name], path)
    assert failure is None, failure.text

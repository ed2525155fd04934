"""Short runs of every fuzzer with fixed inputs, and replays of inputs that found bugs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing.engine import looping
from fuzzing.runs import REGRESSIONS, drive, replay
from fuzzing.targets import FUZZERS
from support.slow import slow_except

# Number of inputs per fuzzer; the default is SOME.
SOME = 300
FEW = {
    "agent": 25,
    "gateway": 40,
    "liar": 20,
    "farm-answers": 60,
    "verdicts": 60,
    "onnx": 150,
    "mlir": 30,
    "golden": 100,
}
SEED = 16
FOUND = [
    pytest.param(path.parent.name, path, id=f"{path.parent.name}-{path.name}")
    for path in sorted(REGRESSIONS.glob("*/*"))
]


@pytest.mark.parametrize("name", slow_except(FUZZERS, *range(0, len(FUZZERS), 4)))
def test_fuzzer_short_run_passes(name: str, tmp_path: Path) -> None:
    fuzzer = FUZZERS[name]
    if lacking := fuzzer.lacking():
        pytest.skip(lacking)
    inputs = FEW.get(name, SOME)
    if fuzzer.confirm is not None:  # the inputs may crash the process
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
def test_fuzzer_passes_recorded_failures(name: str, path: Path) -> None:
    if lacking := FUZZERS[name].lacking():
        pytest.skip(lacking)
    failure = replay(FUZZERS[name], path)
    assert failure is None, failure.text

"""Traces of TensorFlow modules on an emulated Arm board over SSH."""

from __future__ import annotations

import numpy as np
import pytest
from support.traced_modules import Classifier, Counter

from hil.core.results import Outcome
from hil.testing import Trace, compare_backends, ndarange, uniform

pytestmark = pytest.mark.board


@pytest.fixture
def backend(board_aarch64, tmp_path, shared_cache, monkeypatch) -> str:
    """Write a config for the board and return it as a backend."""
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arm.toml").write_text(
        f"""
[board]
hw_type = "arm"

[devices]
iree = "local-sync"
tflite = ""

[connection]
address = "root@{board_aarch64.ip}"
identity = "{board_aarch64.identity}"
known_hosts = "{board_aarch64.known_hosts}"
"""
    )
    return "board:arm.toml"


def test_traces_pass_on_arm_board_over_ssh(backend):
    def counted(module):
        module.add(2)
        assert module.add(3)["now"] == 5

    def trained(module):
        for _ in range(2):
            module.train({"x": uniform([8, 4]), "y": ndarange([8], np.int32) % 3}, rtol=1e-5)

    for function, module in ((counted, Counter), (trained, Classifier)):
        [result] = compare_backends(function, module, target_backends=backend)
        assert result.outcome is Outcome.PASS, result.lines()
        trace = Trace.load(result.folder)
        assert len(trace.calls) == 2 and trace.ran_by.endswith("local-sync")
        assert (result.folder / "flagfile_call_1").is_file()


def test_board_serves_as_multiple_trace_backends(backend):
    def added(module):
        module.get()

    results = compare_backends(added, Counter, target_backends=[backend, f"{backend}:tflite", backend])
    assert [result.outcome for result in results] == [Outcome.PASS] * 3, results
    assert [result.record.runtime for result in results] == ["iree", "tflite", "iree"]

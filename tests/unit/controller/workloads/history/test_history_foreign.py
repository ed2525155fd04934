"""Import of measurements of other tools.

The data files are from `iree-benchmark-module` (IREE 3.13) and Polygraphy 0.53.6, both called for this test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hil.controller.records.measurements.history import SourceState
from hil.controller.workloads.history.foreign import ForeignNames, parse_foreign, read_foreign
from hil.errors import UsageError

DATA = Path(__file__).parents[4] / "data/history"
# The lines of TensorFlow's benchmark_model 2.18.
LOG = """\
INFO: STARTING!
INFO: Graph: [/models/ssd.tflite]
INFO: Loaded model /models/ssd.tflite
INFO: Running benchmark for at least 1 iterations and at least 0.5 seconds but terminate if exceeding 150 seconds.
INFO: count=1 curr=1357602 p5=1357602 median=1357602 p95=1357602
INFO: Running benchmark for at least 50 iterations and at least 1 seconds but terminate if exceeding 150 seconds.
INFO: count=50 first=1250 curr=1240 min=1238 max=1252 avg=1.25027e+03 std=25 p5=1238 median=1239 p95=1247
INFO: Inference timings in us: Init: 5579, First inference: 1357602, Warmup (avg): 1.3576e+06, Inference (avg): 1250.27
INFO: Memory footprint delta from the start of the tool (MB): init=6.5 overall=109.5
"""
# The layout of trtexec's exportJSONTrace.
TIMES = """[
  { "startEnqMs" : 0.1, "endEnqMs" : 0.2, "startComputeMs" : 0.25, "endComputeMs" : 1.25, "computeMs" : 1.0 }
, { "startEnqMs" : 1.1, "endEnqMs" : 1.2, "startComputeMs" : 1.5, "endComputeMs" : 2.75 }
]
"""


def test_google_benchmark_means_of_repetitions_are_samples():
    kind, (case,) = parse_foreign((DATA / "google-benchmark.json").read_bytes())
    assert kind == "google-benchmark"
    assert (case.name, case.board) == ("BM_abs/process_time/real_time", "board")
    assert case.samples_ns == pytest.approx([43836.1, 41862.97, 17718.49], abs=0.01)
    assert case.iterations == 3 * 722
    assert case.created == 1796012925.0


def test_google_benchmark_error_becomes_reason():
    rows = [{"name": "BM_a", "run_name": "BM_a", "error_occurred": True, "error_message": "no device"}]
    _, (case,) = parse_foreign(json.dumps({"benchmarks": rows}).encode())
    assert (case.samples_ns, case.reason) == ([], "no device")


def test_polygraphy_runtimes_are_samples():
    kind, (case,) = parse_foreign((DATA / "polygraphy.json").read_bytes())
    assert (kind, case.name, case.clock, case.iterations) == ("polygraphy", "onnxrt-runner", "host", 3)
    assert case.samples_ns[0] == pytest.approx(481367, abs=1)


def test_benchmark_model_log_gives_median_and_memory():
    kind, (case,) = parse_foreign(LOG.encode())
    assert (kind, case.model, case.iterations, case.p50_ns) == ("benchmark-model", "ssd.tflite", 50, 1239e3)
    assert case.peak_memory_bytes == int(109.5 * (1 << 20))


def test_benchmark_model_log_without_median_gives_mean():
    lines = [line.split(" p5=")[0] for line in LOG.splitlines()]
    _, (case,) = parse_foreign("\n".join(lines).encode())
    assert case.p50_ns == pytest.approx(1250.27e3)


def test_benchmark_model_log_may_have_several_models():
    _, cases = parse_foreign((LOG + LOG).encode())
    assert [case.name for case in cases] == ["ssd.tflite", "ssd.tflite 2"]


def test_trtexec_times_are_compute_times():
    kind, (case,) = parse_foreign(TIMES.encode())
    assert (kind, case.samples_ns, case.iterations) == ("trtexec", [1e6, 1.25e6], 2)


def test_read_foreign_names_entry_and_run_by_content(tmp_path):
    (tmp_path / "resnet.json").write_text(TIMES)
    (tmp_path / "copy.json").write_text(TIMES)
    state = SourceState(commit="1a2b")
    (entry,) = read_foreign(tmp_path / "resnet.json", "", ForeignNames(board="orin"), state)
    assert (entry.key.model, entry.key.board, entry.key.runtime) == ("resnet", "orin", "tensorrt")
    assert (entry.outcome, entry.p50_ns, entry.source.commit) == ("SKIP", 1.125e6, "1a2b")
    (again,) = read_foreign(tmp_path / "copy.json", "trtexec", ForeignNames(), state)
    assert again.run == entry.run


BROKEN = {
    "": "unknown format",
    "text": "unknown format",
    '{"a": 1}': "unknown format",
    "[": "invalid JSON",
    "[]": "no measurement",
    "[1]": r"\[0\] must be an object, got 1",
    '[{"computeMs": "x"}]': r"\[0\].computeMs must be a number, got 'x'",
    '[{"computeMs": 1}, {"computeMs": NaN}]': r"\[1\].computeMs must be a positive time, got nan",
    '[{"startComputeMs": [], "endComputeMs": 1}]': r"\[0\].computeMs must be a number, got None",
    '{"benchmarks": 1}': "benchmarks must be a list, got 1",
    '{"benchmarks": [{"name": "a"}]}': r"benchmarks\[0\].real_time must be a number, got None",
    '{"benchmarks": [{"name": "a", "real_time": 1, "time_unit": "h"}]}': "time_unit must be ns, us, ms, s, got 'h'",
    '{"benchmarks": [{"name": "a", "real_time": 1, "iterations": 0}]}': "iterations must be a positive whole number",
    '{"benchmarks": [{"name": "", "real_time": 1}]}': r"benchmarks\[0\].name must be a text",
    '{"benchmarks": [], "context": 1}': "context must be an object",
    '{"lst": [["a"]]}': r"lst\[0\] must be a list of a runner and its iterations, got list",
    '{"lst": [["a", [{"runtime": -1}]]]}': r"lst\[0\]\[1\]\[0\].runtime must be a positive time, got -1",
    '{"lst": [["a", [{"runtime": ' + "9" * 400 + "}]]]}": "must be a positive time",
    LOG.replace("median=1239", "median=x"): "line 8: expected a number, got 'x'",
    LOG.replace("overall=109.5", "overall=1.0.9"): "line 9: expected a size in MB",
}


@pytest.mark.parametrize(("text", "why"), BROKEN.items(), ids=range(len(BROKEN)))
def test_read_foreign_names_place_of_error(tmp_path, text, why):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=why) as raised:
        read_foreign(tmp_path / "a.json", "", ForeignNames(), SourceState())
    assert str(tmp_path / "a.json") in raised.value.message


def test_read_foreign_rejects_missing_and_special_files(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            read_foreign(path, "", ForeignNames(), SourceState())

"""Every workload reports a program that ran, in whole or in part, on a device other than requested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import DIGITS
from support.plugin_runs import Project, save_small
from support.slow import slow_except

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.controller.models.importers import import_model
from hil.controller.records.run import DeviceStatistics
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.results import Artifact, Outcome
from hil.testing import ModelFile, compare_backends, uniform

ALL, PART = "fallback", "fallback:share=0.3"
ORT = ("--runtime", "onnxruntime")
ELSEWHERE = "ran on another-device, not on CPUExecutionProvider"
NOTE = f"3 of 10 nodes {ELSEWHERE}: node 0, node 1, node 2"
QUICK_BENCH = ("--iterations", 4, "--warmup", 0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save_small(tmp_path)


@pytest.fixture
def bundle(small: Path, tmp_path: Path) -> Path:
    """Create a bundle of the model with a case, for ONNX Runtime."""
    with Isolated(1) as isolated:
        model = import_model(small, isolated=isolated)
    program = Artifact("onnxruntime", small.name, {small.name: small}, {}, "", "none", (), model.inputs, model.outputs)
    a, b = (np.array(values, np.float32) for values in ([-1, 0, 1, 2], [1, 1, 1, 1]))
    path = tmp_path / "small.hilb"
    Bundle.create(program, [MethodTestSuite("main", [MethodTestCase([a, b], [np.maximum(a, 0) + b])])]).save(path)
    return path


def told(words: list[Any], fault: str, *more: str) -> list[Any]:
    return [*words, "--runtime-hw-type", "sim", "--fault", fault, *more, "--json"]


def check(found: dict[str, Any], fault: str, no_fallback: bool) -> None:
    """Check the fallback in a record of a case, side or finding."""
    outcome, reason = found["outcome"], found.get("reason", found.get("message"))
    where = found.get("provenance", found)
    if fault == ALL or no_fallback:
        assert outcome == "FALLBACK", found
        assert ELSEWHERE in reason
    else:
        assert outcome == "PASS", found
        assert where["elsewhere"] == NOTE
    devices = [part["device"] for part in where["placement"]]
    assert devices == (["another-device"] if fault == ALL else ["CPUExecutionProvider", "another-device"])
    assert where["placement"][-1]["elsewhere"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "no_fallback"), [(ALL, False), (PART, False), (PART, True)])
@pytest.mark.parametrize("workload", ["run", "suite run", "bundle run", "bench"])
def test_workloads_report_fallback(hil, request, small, workload, fault, no_fallback):
    more = ("--no-fallback",) if no_fallback else ()
    words = {
        "run": ["run", small, *ORT],
        "suite run": ["suite", "run", small, "--flow", "onnxruntime", "--no-layers", "--out", "out"],
        "bench": ["bench", small, *ORT, *QUICK_BENCH],
    }
    ended = hil(
        *told(words.get(workload) or ["bundle", "run", request.getfixturevalue("bundle")], fault, *more),
    )
    assert ended.code == (3 if fault == ALL or no_fallback else 0), (ended.out, ended.err)
    (found,) = ended.document["sides" if workload == "bench" else "cases"]
    check(found, fault, no_fallback)
    if workload != "suite run" and found["outcome"] == "FALLBACK":
        assert not (found.get("device") or {}).get("p50_ns") if workload != "bench" else not found["times"]


def test_cli_prints_fallback_note(hil, small, bundle):
    for words in (["run", small, *ORT], ["bundle", "run", bundle], ["bench", small, *ORT, *QUICK_BENCH]):
        ended = hil(*words, "--runtime-hw-type", "sim", "--fault", PART)
        assert NOTE in " ".join(ended.out.split()), ended.out
    ended = hil("run", small, *ORT, "--runtime-hw-type", "sim", "--fault", ALL)
    assert ended.out.startswith("FALLBACK  small"), ended.out
    assert "10 nodes on another-device: simulated: fault fallback (node 0, " in " ".join(ended.out.split())
    ended = hil("suite", "run", small, "--flow", "onnxruntime", "--out", "o", "--fault", PART)
    noted = f"3 cases ran partly on a different device: small_full_model: {NOTE}"
    assert noted in " ".join(ended.out.split()), ended.out


@pytest.mark.slow
def test_bisect_reports_fallback(hil, small):
    ended = hil(*told(["bisect", small, *ORT, "--isolated"], PART))
    assert ended.code == 0, ended.err
    for layer in ended.document["layers"]:
        check(layer["isolated"], PART, False)
    assert all(ELSEWHERE in note for note in ended.document["notes"]) and ended.document["notes"]
    ended = hil(*told(["bisect", small, *ORT, "--isolated"], PART, "--no-fallback"))
    assert ended.code == 3
    assert {layer["isolated"]["outcome"] for layer in ended.document["layers"]} == {"FALLBACK"}


@pytest.mark.slow
def test_pytest_plugin_reports_fallback(tmp_path, environment, small):
    project = Project(tmp_path / "project", environment).set_up(small)
    board = '[board]\nhw_type = "sim"\n[devices]\nonnxruntime = "CPUExecutionProvider"\n[simulator]\n'
    for name, fault in (("all", ALL), ("part", PART)):
        project.write(f"{name}.toml", f'{board}faults = ["{fault}"]\n')
    flow = ("--hil-flow", "onnxruntime", "--hil-no-layers", "-rP")
    tested = project.test("--board=all.toml", *flow)
    assert tested.code == 1 and "FALLBACK" in tested.out and ELSEWHERE in tested.out
    tested = project.test("--board=part.toml", *flow)
    assert tested.code == 0 and NOTE in tested.out, tested.out
    ((_, properties),) = tested.properties.items()
    assert properties["hil_elsewhere"] == NOTE
    assert properties["hil_placement"] == "CPUExecutionProvider (7 nodes), another-device (3 nodes)"
    why = "3 nodes on another-device: simulated: fault fallback (node 0, node 1, node 2)"
    assert properties["hil_placement_reasons"] == why
    tested = project.test("--board=part.toml", *flow, "--hil-no-fallback")
    assert tested.code == 1 and "FALLBACK" in tested.out
    assert "--no-fallback" in tested.command("repeat it")


@pytest.mark.slow
def test_traces_report_fallback(tmp_path, shared_cache, monkeypatch):
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    monkeypatch.chdir(tmp_path)

    class Digits:
        predict = ModelFile(DIGITS / "digits_cnn.onnx")

    def predicted(module):
        module.predict(uniform([1, 1, 8, 8]))

    for name, fault in (("all", ALL), ("part", PART)):
        Path(f"{name}.toml").write_text(
            '[board]\nhw_type = "sim"\n[devices]\niree = "local-task"\n'
            '[compile_flags]\niree = ["--iree-hal-target-device=local", "--iree-llvmcpu-target-cpu=host",'
            ' "--iree-hal-local-target-device-backends=llvm-cpu"]\n'
            f'[simulator]\nfaults = ["{fault}"]\n'
        )
    whole, part = compare_backends(predicted, Digits, target_backends=["board:all.toml", "board:part.toml"])
    assert (whole.outcome, part.outcome) == (Outcome.FALLBACK, Outcome.PASS), (whole.lines(), part.lines())
    assert "ran on another-device, not on local-task" in whole.record.message
    assert "another-device (3 nodes)" in (part.folder / "log.txt").read_text()


@pytest.mark.slow
def test_agent_verify_reports_fallback(bundle, capsys, monkeypatch):
    from hil.agent import runtimes, verify

    monkeypatch.setattr(
        runtimes, "list_runtimes", lambda: {"onnxruntime": "hil.agent.runtimes.onnxruntime:OnnxRuntime"}
    )
    assert verify.main([str(bundle), "--device", "AzureExecutionProvider", "--json"]) == 3
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["outcome"], case["error"]["kind"]) == ("FALLBACK", "RanElsewhere")
    assert case["reason"] == "all 2 nodes ran on CPUExecutionProvider, not on AzureExecutionProvider"
    assert [part["device"] for part in case["placement"]] == ["CPUExecutionProvider"]
    assert verify.main([str(bundle), "--no-fallback"]) == 0


def test_run_reports_unused_provider_as_fallback(hil, small, tmp_path):
    """ONNX Runtime silently uses the CPU in place of this provider."""
    (tmp_path / "b.toml").write_text('[board]\n[simulator]\n[devices]\nonnxruntime = "AzureExecutionProvider"\n')
    ended = hil("run", small, *ORT, "--board", "b.toml", "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "FALLBACK"), ended.out
    assert ended.case["reason"] == "all 2 nodes ran on CPUExecutionProvider, not on AzureExecutionProvider"
    assert ended.case["device"] == DeviceStatistics(iterations=0).to_json()
    (part,) = ended.case["provenance"]["placement"]
    assert (part["nodes"], part["names"], part["reasons"]) == (2, ["relu (Relu)", "add (Add)"], [])
    ended = hil("run", small, *ORT, "--device", "azure")
    assert "why 2 nodes on CPUExecutionProvider: reason not reported by onnxruntime" in " ".join(ended.out.split())


def test_run_prints_facts_of_nodes_outside_xnnpack(hil):
    ended = hil("run", DIGITS.parent / "tflite" / "digits_int8.tflite", "--atol", 1)
    fact = "why 1 node on builtin: reason not reported by LiteRT; its inputs are 1x10 int8 (SOFTMAX)"
    assert fact in " ".join(ended.out.split())


@pytest.mark.parametrize(
    ("runtime", "device"),
    slow_except([("onnxruntime", "NoSuchProvider"), ("iree", "cuda"), ("iree", "nowhere"), ("tflite", "gpu")], 0),
)
def test_run_reports_missing_device_as_board_unfit(hil, small, tmp_path, runtime, device):
    model = DIGITS.parent / "tflite" / "digits.tflite" if runtime == "tflite" else small
    (tmp_path / "b.toml").write_text(f'[board]\n[simulator]\n[devices]\n{runtime} = "{device}"\n')
    ended = hil("run", model, "--runtime", runtime, "--board", "b.toml", "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_UNFIT"), ended.out
    assert device in ended.case["reason"]

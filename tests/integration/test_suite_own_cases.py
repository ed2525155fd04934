"""Test cases stored with models: suites and tests run every case of a bundle, trace or golden set."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.commands import Ended, run_hil
from support.models import save_model
from support.plugin_runs import Project
from support.slow import slow_except

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.testing import ModelFile, compare_backends, ndarange

TWO = """
func.func @add(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func @twice(%x: tensor<3xi32>) -> tensor<3xi32> {
  %0 = arith.addi %x, %x : tensor<3xi32>
  return %0 : tensor<3xi32>
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, shared_cache) -> Path:
    """The bundle two.hilb: two methods of three cases. The second case of ``twice`` is wrong."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "two.mlir").write_text(TWO)
    call = ["bundle", "create", "two.mlir"]
    for method, dtype, size, count in (("add", np.float32, 4, 2), ("twice", np.int32, 3, 1)):
        for seed in range(3):
            inputs = [np.full(size, seed + number, dtype) for number in range(count)]
            place = folder / method / f"seed{seed}.npz"
            place.parent.mkdir(exist_ok=True)
            output = inputs[0] + inputs[-1]
            np.savez(place, **{f"arg{number}": one for number, one in enumerate(inputs)}, output0=output)
            call += ["--case", f"{method}={place}"]
    ended = run_hil(call, {**os.environ, "HIL_CACHE_DIR": str(shared_cache)}, folder)
    assert ended.code == 0, ended.err
    right = Bundle.open(folder / "two.hilb")
    suites = []
    for method in right.methods:
        cases = [
            MethodTestCase(case.inputs, case.expected_outputs, name=case.name, source=case.source)
            for case in method.cases
        ]
        if method.name == "twice":
            wrong = {name: array + 1 for name, array in cases[1].expected_outputs.items()}
            cases[1] = replace(cases[1], expected_outputs=wrong)
        suites.append(MethodTestSuite(method.name, cases))
    (folder / "program").mkdir()
    signatures = {method.name: method.signature for method in right.methods}
    Bundle.create(right.extract(folder / "program"), suites, signatures=signatures).save(folder / "wrong.hilb")
    return folder / "wrong.hilb"


@pytest.fixture
def bundled(made: Path, tmp_path: Path) -> Path:
    """A directory with that bundle."""
    folder = tmp_path / "nets"
    folder.mkdir()
    shutil.copy(made, folder / "two.hilb")
    return folder


def ends(ended: Ended) -> dict[str, str]:
    return {case["id"]: case["outcome"] for case in ended.document["cases"]}


CASES = [f"{method}_seed{seed}" for method in ("add", "twice") for seed in range(3)]
ENDS = dict.fromkeys(CASES, "PASS") | {"twice_seed1": "FAIL"}


@pytest.mark.parametrize("form", slow_except(["hilb", "golden", "flagfile"], 0))
def test_suite_runs_every_bundle_case_and_method(hil, simulator, bundled, tmp_path, form):
    source, prefix = bundled, "two"
    if form != "hilb":
        source, prefix = tmp_path / "others", "two" if form == "golden" else "main"
        assert hil("bundle", "export", bundled / "two.hilb", source / "two", "--to", form).code == 0
    ended = hil("suite", "run", source, "--flow", "iree", "--board", simulator, "--json")
    told = {f"{prefix}_{name if form != 'flagfile' else name.replace('_', '-')}": end for name, end in ENDS.items()}
    assert ends(ended) == told and ended.code == 1, ended.err
    wrong = next(case for case in ended.document["cases"] if case["outcome"] == "FAIL")
    # The case can run separately, and reports the source of the expected outputs.
    again = hil("suite", "run", source, "--flow", "iree", "--filter", f"={wrong['id']}", "--json")
    assert ends(again) == {wrong["id"]: "FAIL"} and wrong["against"]


@pytest.mark.slow
def test_plugin_runs_every_bundle_case(bundled, tmp_path, environment):
    project = Project(tmp_path / "project", environment).set_up(bundled / "two.hilb")
    tested = project.test("--hil-flow=iree", "--runtime-hw-type=sim")
    words = {"PASS": "passed", "FAIL": "failure"}
    assert tested.outcomes == {f"two_{name}-sim": words[end] for name, end in ENDS.items()}, tested.out
    chosen = project.test("--hil-flow=iree", "models/two.hilb::two_twice_seed1-sim")
    assert chosen.outcomes == {"two_twice_seed1-sim": "failure"}


def test_confirm_uses_expected_outputs_of_bundle(hil, bundled):
    ended = hil("suite", "run", bundled, "--flow", "iree", "--filter", "=two_twice_seed1", "--confirm", 2, "--json")
    (case,) = ended.document["cases"]
    assert (case["outcome"], case["confirmed"]) == ("FAIL", "always wrong")


def test_unsupported_flow_gives_error_per_bundle_case(hil, bundled):
    ended = hil("suite", "run", bundled, "--flow", "onnxruntime", "--json")
    assert set(ends(ended).values()) == {"IMPORT_ERROR"} and len(ends(ended)) == 6 and ended.code == 3
    assert "a program for iree" in ended.document["cases"][0]["message"]


def test_unreadable_bundle_gives_import_error(hil, bundled):
    whole = (bundled / "two.hilb").read_bytes()
    (bundled / "two.hilb").write_bytes(whole[:-64])
    ended = hil("suite", "run", bundled, "--flow", "iree", "--json")
    assert ends(ended) == {"two_full_model": "IMPORT_ERROR"} and ended.code == 3


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A directory with y = x + x and three ONNX test data sets. The last set is wrong."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    value = (TensorProto.FLOAT, ["N"])
    save_model(folder / "model.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [("x", *value)], [("y", *value)])
    for number, factor in enumerate((2, 2, 3)):
        x = np.arange(1, number + 4, dtype=np.float32)
        save_tensors(folder / f"test_data_set_{number}", input_0=x, output_0=factor * x)
    return folder


def save_tensors(folder: Path, **tensors: np.ndarray) -> None:
    folder.mkdir(parents=True)
    for name, array in tensors.items():
        (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())


ZOO = {f"model_test_data_set_{number}": "FAIL" if number == 2 else "PASS" for number in range(3)}


@pytest.mark.slow
def test_suite_runs_onnx_test_data_as_cases(hil, simulator, zoo):
    ended = hil("suite", "run", zoo, "--flow", "onnxruntime", "--board", simulator, "--json")
    # The full model uses the inputs and the dimension of the first set.
    assert ends(ended) == {"model_full_model": "PASS", **ZOO, "model_layer_Add_Add_0": "PASS"}, ended.err
    one = hil("suite", "run", zoo / "model.onnx", "--flow", "onnxruntime", "--no-layers", "--json")
    assert ends(one) == {"model_full_model": "PASS", **ZOO}


def test_plugin_runs_onnx_test_data_as_tests(zoo, tmp_path, environment):
    project = Project(tmp_path / "project", environment).set_up()
    shutil.copytree(zoo, project.models / "zoo")
    tested = project.test("--hil-flow=onnxruntime", "--runtime-hw-type=sim", "-k", "test_data_set")
    words = {"PASS": "passed", "FAIL": "failure"}
    assert tested.outcomes == {f"{name}-sim": words[end] for name, end in ZOO.items()}, tested.out


def test_mismatched_test_data_fails_only_affected_case(hil, zoo):
    save_tensors(zoo / "test_data_set_3", input_0=np.ones(3, np.float64), output_0=np.ones(3, np.float32))
    save_tensors(zoo / "test_data_set_4", input_0=np.ones(3, np.float32))
    ended = hil("suite", "run", zoo, "--flow", "onnxruntime", "--no-layers", "--json")
    odd = {f"model_test_data_set_{number}": "IMPORT_ERROR" for number in (3, 4)}
    assert ends(ended) == {"model_full_model": "PASS", **ZOO, **odd}


@pytest.mark.slow
def test_suite_reports_cases_without_matching_model(hil, zoo, tmp_path, environment):
    onnx.save(onnx.load(zoo / "model.onnx"), zoo / "second.onnx")
    (zoo / "model.onnx").rename(zoo / "first.onnx")
    (zoo / "bench.flagfile").write_text("--module=a.vmfb\n--input=4xf32=1\n")
    ended = hil("suite", "run", zoo, "--flow", "onnxruntime", "--no-layers", "--dim", "N=4", "--json")
    assert ends(ended) == {"first_full_model": "PASS", "second_full_model": "PASS"}
    told = ended.document["left_out"]
    assert len(told) == 2 and "3 test_data_set_N" in told[1] and "bench.flagfile" in told[0]
    assert all(f"left out: {line}" in ended.err for line in told)
    project = Project(tmp_path / "project", environment).set_up()
    shutil.copytree(zoo, project.models / "zoo")
    collected = project.test("--collect-only", "--hil-dim", "N=4").out
    assert collected.count("hil: left out: ") == 2


def call_thrice(module) -> None:
    for start in (0, 1, 2):
        module.add(ndarange([4]).astype(np.float32) + start, ndarange([4]).astype(np.float32))


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """The trace directory of three calls. The flag file of the last call expects wrong values."""
    (tmp_path / "two.mlir").write_text(TWO)

    class Module:
        add = ModelFile(tmp_path / "two.mlir", "add")

    (result,) = compare_backends(
        call_thrice, Module, target_backends="iree_llvmcpu", reference_backend="iree-llvm-cpu", artifacts_dir=tmp_path
    )
    flags = result.folder / "flagfile_call_2"
    (expected,) = [line for line in flags.read_text().splitlines() if line.startswith("--expected_output=")]
    flags.write_text(flags.read_text().replace(expected, "--expected_output=4xf32=1 2 3 4"))
    return result.folder


@pytest.mark.slow
def test_bundle_import_converts_trace_calls_to_cases(hil, traced, tmp_path):
    ended = hil("bundle", "import", traced, "--from", "flagfile", "-o", "traced.hilb")
    assert ended.code == 0 and "3 cases" in ended.out and "left out" not in ended.err
    (method,) = Bundle.open(tmp_path / "traced.hilb").methods
    assert [case.name for case in method.cases] == ["call_0", "call_1", "call_2"]


@pytest.mark.slow
def test_trace_calls_without_flagfile_are_reported(hil, traced):
    (traced / "flagfile_call_1").unlink()
    ended = hil("bundle", "import", traced, "--from", "flagfile", "-o", "traced.hilb")
    assert "2 cases" in ended.out and "1 of 3 calls have no flag file" in ended.err
    ended = hil("suite", "run", traced, "--flow", "iree", "--json")
    assert len(ends(ended)) == 2 and "1 of 3 calls have no flag file" in ended.err


@pytest.mark.slow
def test_suite_runs_every_trace_call_as_case(hil, traced):
    of_trace = hil("suite", "run", traced, "--flow", "iree", "--json")
    assert list(ends(of_trace).values()) == ["PASS", "PASS", "FAIL"] and of_trace.code == 1, of_trace.err
    of_backend = hil("suite", "run", traced.parents[1], "--flow", "iree", "--json")
    assert ends(of_backend) == {
        "compiled_traces.call_thrice.call_0": "PASS",
        "compiled_traces.call_thrice.call_1": "PASS",
        "compiled_traces.call_thrice.call_2": "FAIL",
    }

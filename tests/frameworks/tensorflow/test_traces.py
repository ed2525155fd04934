"""TensorFlow modules traced on several backends: the documented example, state, training and errors."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.traced_modules import (
    ByHandles,
    Classifier,
    Counter,
    Edges,
    Empty,
    Global,
    Large,
    Recurrent,
    Refused,
    Register,
    Scaled,
    Sums,
    tf,
)

from hil.core.results import Outcome
from hil.errors import RunFailed, UsageError
from hil.formats.iree_command import own_tool
from hil.testing import Trace, compare_backends, ndarange, uniform

# The documented example, with other imports and a module.
SIMPLE = """
import numpy as np
import tensorflow as tf

import hil.testing as tf_test_utils
import hil.testing as tf_utils


class SimpleArithmeticModule(tf.Module):

  @tf.function(input_signature=[tf.TensorSpec([4], tf.float32), tf.TensorSpec([4], tf.float32)])
  def simple_mul(self, a, b):
    return a * b


# Compile a `tf.Module` named `SimpleArithmeticModule` into a `CompiledModule`.
@tf_test_utils.compile_module(SimpleArithmeticModule)
# Inherit from `TracedModuleTestCase`.
class SimpleArithmeticTest(tf_test_utils.TracedModuleTestCase):

  # Unit test.
  def test_simple_mul(self):

    # Trace function.
    def simple_mul(module):
      # A random seed is automatically set before each call to `simple_mul`.
      a = tf_utils.uniform([4])
      b = np.array([400., 5., 6., 7.], dtype=np.float32)

      # The inputs `a` and `b` are recorded along with the output `c`
      c = module.simple_mul(a, b)

      # The inputs `a` and `b` are recorded along with the (unnamed) output
      # module.simple_mul returns.
      module.simple_mul(a, c)

    # Calls `simple_mul` once for each backend, recording the inputs and outputs
    # to `module` and then comparing them.
    self.compare_backends(simple_mul)


if __name__ == "__main__":
  tf_test_utils.main()
"""
FAULTY = """
[board]
hw_type = "sim"

[devices]
iree = "local-task"

[compile_flags]
iree = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
]

[simulator]
faults = ["corrupt:output=1,others=spare"]
"""


@pytest.fixture(autouse=True)
def place(tmp_path, shared_cache, monkeypatch) -> Path:
    """Change to an empty directory and use the shared cache."""
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Report files for several backends.
REPORT = {"matrix.csv", "matrix.md", "matrix.html", "junit.xml"}


def python(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=280, env=dict(os.environ)
    )


def batches(module, steps: int = 3):
    for _ in range(steps):
        module.train({"x": uniform([8, 4]), "y": ndarange([8], np.int32) % 3}, rtol=1e-5)


def test_traces_example_writes_documented_files(place):
    (place / "simple_arithmetic_test.py").write_text(SIMPLE)
    done = python(
        "simple_arithmetic_test.py", "--target_backends=iree_llvmcpu,iree_vmvx,tflite", "--artifacts_dir=modules"
    )
    assert done.returncode == 0, done.stderr
    module = place / "modules" / "SimpleArithmeticModule"
    drawn = ["tf_input.mlir", "iree_input.mlir", "tflite/simple_mul.tflite"]
    for backend in ("iree_llvmcpu", "iree_vmvx"):
        drawn += [f"{backend}/compiled.vmfb", f"{backend}/traces/simple_mul/flagfile"]
    drawn += [f"{backend}/traces/simple_mul/log.txt" for backend in ("iree_llvmcpu", "iree_vmvx", "tflite", "tf_ref")]
    assert [path for path in drawn if not (module / path).is_file()] == []
    assert {path.name for path in module.iterdir()} == REPORT | {
        "tf_input.mlir", "iree_input.mlir", "iree_llvmcpu", "iree_vmvx", "tflite", "tf_ref"
    }  # fmt: skip
    heads, *rows = list(csv.reader((module / "matrix.csv").read_text().splitlines()))
    assert [dict(zip(heads, row, strict=True))["id"] for row in rows] == ["SimpleArithmeticModule/simple_mul"]
    assert heads[5:8] == ["iree_llvmcpu", "iree_vmvx", "tflite"] and rows[0][4:8] == ["no", "PASS", "PASS", "PASS"]
    ref_trace = Trace.load(f"{module}/tf_ref/traces/simple_mul/")
    tar_trace = Trace.load(f"{module}/iree_vmvx/traces/simple_mul/")
    abs_diff = np.abs(ref_trace.calls[0].outputs[0] - tar_trace.calls[0].outputs[0])
    assert np.mean(abs_diff) < 1e-4
    assert [call.method for call in tar_trace.calls] == ["simple_mul", "simple_mul"]
    assert (ref_trace.calls[0].outputs[0] == ref_trace.calls[1].inputs[1]).all()
    assert "tf.Mul" in (module / "tf_input.mlir").read_text()
    assert "stablehlo.multiply" in (module / "iree_input.mlir").read_text()
    log = (module / "iree_vmvx/traces/simple_mul/log.txt").read_text()
    assert "def simple_mul(module):" in log and "call 1 (simple_mul): ok" in log and "max abs" in log


@pytest.mark.parametrize(
    ("options", "folders"),
    [
        (["--target_backends=tf"], {"tf_ref", "tf"}),
        (
            ["--reference_backend=iree_vmvx", "--target_backends=iree_vmvx,iree_vmvx"],
            {"iree_vmvx_ref", "iree_vmvx_0", "iree_vmvx_1", "tf_input.mlir", "iree_input.mlir"} | REPORT,
        ),
    ],
    ids=["tf beside itself", "a backend beside itself, twice"],
)
def test_pytest_accepts_trace_options(place, options, folders):
    (place / "test_simple.py").write_text(SIMPLE)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_simple.py", *options)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in (place / "hil-traces" / "SimpleArithmeticModule").iterdir()} == folders


def test_trace_creates_new_module_and_carries_state():
    def counted(module):
        assert module.get() == 0
        module.add(2)
        added = module.add(np.float32(3))
        assert added["now"] == 5 and added["parts"][1][1] == 5
        assert module.get() == 5

    for _ in range(2):
        results = compare_backends(counted, Counter, target_backends=["iree_llvmcpu", "board:sim", "tf"])
        assert [result.outcome for result in results] == [Outcome.PASS] * 3, results
    outputs = [output.name for output in results[0].comparisons[1].outputs]
    assert outputs == ["0.now", "0.parts.0", "0.parts.1.0", "0.parts.1.1", "variable count"]


def test_trace_carries_weights_between_training_steps():
    [result] = compare_backends(batches, Classifier)
    assert result.outcome is Outcome.PASS, result.lines()
    losses = [call.outputs[0] for call in Trace.load(result.folder).calls]
    assert len(losses) == 3 and len({loss.item() for loss in losses}) == 3


def test_trace_names_variables_used_through_handles():
    def steps(module):
        for _ in range(2):
            module.step(uniform([8, 4]), rtol=1e-5)

    [result] = compare_backends(steps, ByHandles)
    assert result.outcome is Outcome.PASS, result.lines()
    names = [output.name.removeprefix("variable ") for output in result.comparisons[1].outputs]
    # TensorFlow numbers slots across the whole process; earlier tests may have used Adam.
    slots = sorted(re.sub(r"_\d+$", "", name) for name in names if name != "0")
    assert slots == ["beta1_power", "beta2_power", "weights", "weights/Adam", "weights/Adam"]


def test_trace_compiles_unassigned_variables_as_constants(place):
    def scored(module):
        for _ in range(2):
            module.predict(uniform([2, 4]), rtol=1e-5)
        module.learn(uniform([4]), rtol=1e-5)
        module.predict(uniform([2, 4]), rtol=1e-5)

    [result] = compare_backends(scored, Scaled)
    assert result.outcome is Outcome.PASS, result.lines()
    given = [(result.folder / f"flagfile_call_{n}").read_text().count("--input=") for n in range(4)]
    # weights, bias and scale are constants; offset is a variable of a method with a signature. The method learn has no
    # signature, so its assignment of bias shows only after the call.
    assert given == [2, 2, 2, 3]
    backend = place / "hil-traces" / "Scaled"
    assert (backend / "iree_llvmcpu" / "methods" / "predict_0" / "compiled.vmfb").is_file()
    assert "stablehlo.constant dense<" in (backend / "iree_input.mlir").read_text()


def test_trace_elides_large_constants_in_text(place):
    def multiplied(module):
        module.large(uniform([1, 512]), rtol=1e-5)
        module.larger(uniform([1, 512]), rtol=1e-5)

    [result] = compare_backends(multiplied, Large)
    assert result.outcome is Outcome.PASS, result.lines()
    folder = place / "hil-traces" / "Large"
    assert "dense_resource<__elided__>" in (folder / "iree_input.mlir").read_text()
    assert (folder / "iree_input.mlirbc").stat().st_size > 1 << 20
    # Both methods share the weights.
    assert (folder / "iree_llvmcpu" / "compiled.vmfb").stat().st_size < 3 << 19


def test_trace_supports_keras_layers_and_optimizers():
    def predicted(module):
        module.predict(uniform([2, 6, 4]), rtol=1e-4)

    def learned(module):
        for _ in range(2):
            module.step(uniform([2, 6, 4]), rtol=1e-4)

    results = compare_backends(predicted, Recurrent, target_backends="iree_llvmcpu,tflite", exported_names=["predict"])
    results += compare_backends(learned, Recurrent)
    assert [result.outcome for result in results] == [Outcome.PASS] * 3, [result.lines() for result in results]


def test_trace_compiles_methods_for_called_shapes(place):
    def totals(module):
        module.total(uniform([4]), rtol=1e-5)
        module.total(uniform([2, 2]), rtol=1e-5)
        module.total(uniform([4]), rtol=1e-5)
        module.kinds([200, 255], [True, False])

    [result] = compare_backends(totals, Sums)
    assert result.outcome is Outcome.PASS, result.lines()
    folder = place / "hil-traces" / "Sums"
    assert sorted(path.parent.name for path in folder.glob("iree_llvmcpu/methods/*/compiled.vmfb")) == [
        "total_0",
        "total_1",
    ]
    assert (folder / "iree_llvmcpu" / "compiled.vmfb").is_file()  # for the method with a signature


def test_trace_locates_wrong_call_and_output(place):
    (place / "faulty.toml").write_text(FAULTY)

    def steps(module):
        batches(module, 2)

    good, bad = compare_backends(steps, Classifier, target_backends="iree_llvmcpu,board:faulty.toml")
    assert good.outcome is Outcome.PASS
    assert bad.outcome is Outcome.FAIL
    assert bad.record.message.startswith("call 0 (train): output 1: 1 of 24 values out of tolerance (rtol 1e-05")
    first = bad.comparisons[0].outputs
    assert [(output.name, output.mismatches) for output in first if not output.passed] == [("1", 1)]
    assert len(Trace.load(bad.folder).calls) == 2
    assert "call 0 (train): WRONG" in (bad.folder / "log.txt").read_text()


def run_stock(flagfile: Path) -> subprocess.CompletedProcess[str]:
    words = [own_tool("iree-run-module"), f"--flagfile={flagfile.name}"]
    return subprocess.run(words, cwd=flagfile.parent, capture_output=True, text=True, timeout=120)


def test_trace_compares_state_of_method_without_outputs(place):
    (place / "faulty.toml").write_text(FAULTY.replace("output=1", "output=0"))

    def held(module):
        module.hold(uniform([4]))

    good, bad = compare_backends(held, Register, target_backends="iree_llvmcpu,board:faulty.toml")
    assert (good.outcome, bad.outcome) == (Outcome.PASS, Outcome.FAIL), (good.lines(), bad.lines())
    assert [output.name for output in good.comparisons[0].outputs] == ["variable held"]
    assert "variable held: 1 of 4 values out of tolerance" in bad.record.message
    assert "variable held" in (bad.folder / "log.txt").read_text()
    right, wrong = (Trace.load(result.folder).calls[0] for result in (good, bad))
    assert right.assigned == ("held",) and (right.state["held"] == right.inputs[0]).all()
    assert (wrong.state["held"] != wrong.inputs[0]).any()


def test_trace_finds_wrong_weight_after_last_step(place):
    (place / "faulty.toml").write_text(FAULTY.replace("output=1", "output=2"))

    def step(module):
        batches(module, 1)

    good, bad = compare_backends(step, Classifier, target_backends="iree_llvmcpu,board:faulty.toml")
    assert good.outcome is Outcome.PASS, good.lines()
    assert {output.name for output in good.comparisons[0].outputs} == {"0", "1", "variable weights", "variable bias"}
    assert bad.outcome is Outcome.FAIL, bad.lines()
    [spoilt] = [output.name for output in bad.comparisons[0].outputs if not output.passed]
    assert spoilt in ("variable weights", "variable bias") and spoilt in bad.record.message
    # The program is correct; only the board is faulty.
    for result in (good, bad):
        done = run_stock(result.folder / "flagfile")
        assert done.returncode == 0 and "[SUCCESS]" in done.stdout, done.stdout


def test_trace_reports_wrong_state_before_reassignment(place):
    (place / "faulty.toml").write_text(FAULTY.replace("output=1", "output=0,times=1"))

    def held(module):
        module.hold(uniform([4]))
        module.hold(uniform([4]))
        module.clear()
        module.clear()

    good, bad = compare_backends(held, Register, target_backends="iree_llvmcpu,board:faulty.toml")
    assert good.outcome is Outcome.PASS, good.lines()
    assert [bool(call) for call in bad.comparisons] == [False, True, True, True], bad.lines()
    # The last call changed no value, but the program returned a new value.
    assert [output.name for output in good.comparisons[3].outputs] == ["variable held"]


def test_trace_names_variables_equally_across_modules():
    tf.keras.backend.clear_session()  # Keras numbers layer names across all models

    def learned(module):
        module.step(uniform([2, 6, 4]), rtol=1e-4)

    for result in compare_backends(learned, Recurrent, target_backends="iree_llvmcpu,tf", exported_names=["step"]):
        assert result.outcome is Outcome.PASS, result.lines()
        names = [output.name.partition("/")[2] for output in result.comparisons[0].outputs]
        assert len(names) == 20 and "lstm/lstm_cell/kernel" in " ".join(names) and "iteration" in names


def test_trace_reports_unreadable_state():
    def put(module):
        module.put(3)

    def put_in_python(module):
        module.put_in_python(np.float32(5))

    [seen] = compare_backends(put, Global, exported_names=["put"])
    assert seen.outcome is Outcome.PASS and seen.comparisons[0].outputs[0].name == "variable older", seen.lines()
    [unseen] = compare_backends(put_in_python, Global, exported_names=["put_in_python"])
    assert unseen.outcome is Outcome.FAIL, unseen.lines()
    message = unseen.record.message
    assert "variable older, assigned on " in message and ", cannot be read on tf: it was not created" in message


def test_trace_without_comparisons_fails():
    def cleared(module):
        module.clear()

    [result] = compare_backends(cleared, Register, target_backends="tf")
    assert result.outcome is Outcome.FAIL and result.record.message.startswith("no values to compare")
    [judged] = compare_backends(cleared, Register)
    assert judged.outcome is Outcome.PASS, judged.lines()


def test_flagfile_omits_expectations_for_missing_reference_call():
    calls = iter((1, 2))

    def uneven(module):
        for _ in range(next(calls)):
            module.hold(uniform([4]))

    [result] = compare_backends(uneven, Register)
    assert result.outcome is Outcome.FAIL and "call missing on " in result.record.message
    assert "--expected_output" in (result.folder / "flagfile_call_0").read_text()
    assert "--expected_output" not in (result.folder / "flagfile_call_1").read_text()


def test_flagfiles_run_with_stock_tools_and_bench(place):
    def steps(module):
        batches(module, 2)

    def kinds(module):
        module.kinds([200, 255], [True, False])

    [trained] = compare_backends(steps, Classifier)
    [kept] = compare_backends(kinds, Sums)
    files = [trained.folder / "flagfile_call_0", trained.folder / "flagfile_call_1", kept.folder / "flagfile"]
    assert (trained.folder / "flagfile").read_text() == files[0].read_text()
    for file in files:
        for tool in ("iree-benchmark-module", "iree-run-module"):
            words = [
                own_tool(tool),
                f"--flagfile={file.name}",
                *(["--benchmark_min_time=2x"] if "benchmark" in tool else []),
            ]
            done = subprocess.run(words, cwd=file.parent, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
            assert ("BM_" if "benchmark" in tool else "[SUCCESS]") in done.stdout
    bench = python("-m", "hil.controller.cli.main", "bench", "--flagfile", files[1], "--iterations", 5, "--json")
    assert bench.returncode == 0, bench.stderr
    assert json.loads(bench.stdout)["sides"][0]["outcome"] == "PASS"


def test_trace_writes_reproducer_for_compile_error(place):
    def factored(module):
        module.factor(np.eye(3, dtype=np.float32))

    def doubled(module):
        module.double(np.eye(3, dtype=np.float32))

    [refused] = compare_backends(factored, Refused)
    assert refused.outcome is Outcome.COMPILE_ERROR, refused.lines()
    backend = place / "hil-traces" / "Refused" / "iree_llvmcpu"
    assert str(backend / "reproduce.sh") in refused.record.hint and "exported_names" in refused.record.hint
    assert "pipeline" in (backend / "reproducer.mlir").read_text()
    again = subprocess.run(["sh", backend / "reproduce.sh"], capture_output=True, text=True, timeout=120)
    assert again.returncode != 0 and "error: " in again.stderr
    assert (place / "hil-traces" / "Refused" / "iree_input.mlir").is_file()
    [taken] = compare_backends(doubled, Refused, exported_names=["double"])
    assert taken.outcome is Outcome.PASS, taken.lines()


def test_trace_supports_empty_tensors():
    def emptied(module):
        module.none_of(uniform([4]))
        module.none_of(uniform([0]))

    for result in compare_backends(emptied, Edges, target_backends="iree_llvmcpu,tflite", exported_names=["none_of"]):
        assert result.outcome is Outcome.PASS, result.lines()


def test_trace_reports_tensorflow_error_messages():
    def reshaped(module):
        module.reshaped(uniform([4]), np.int32(3))

    with pytest.raises(RunFailed, match="a tensor with 4 values, but the requested shape has 6"):
        compare_backends(reshaped, Edges)

    def named(module):
        module.reshaped(uniform([4]), rows=np.int32(2))

    with pytest.raises(UsageError, match="unsupported keyword argument of reshaped: rows"):
        compare_backends(named, Edges)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [([[2, 3]], r"expected shape \(3, 3\), got \(2, 3\)"), ([[3, 3], [1]], "got 2 arguments"), ([], "got 0 arguments")],
    ids=["a wrong shape", "too many", "too few"],
)
def test_trace_rejects_arguments_of_wrong_shape_or_count(shapes, words):
    def given(module):
        module.double(*map(uniform, shapes))

    with pytest.raises(UsageError, match=rf"double expects \(3, 3\) float32: {words}") as caught:
        compare_backends(given, Refused, target_backends="tf")
    assert len(str(caught.value).splitlines()) == 1


def test_trace_reports_unusable_shape_as_run_failure():
    def multiplied(module):
        module.total(uniform([2, 3]))
        module.joined(uniform([2, 3]), uniform([2, 3]))

    with pytest.raises(RunFailed, match="TensorFlow: ValueError: Dimensions must be equal") as caught:
        compare_backends(multiplied, Sums, target_backends="tf")
    assert len(caught.value.message.splitlines()) == 1


def test_trace_reports_tflite_variable_changes_as_compile_error():
    def counted(module):
        module.add(1)

    [result] = compare_backends(counted, Counter, target_backends="tflite")
    assert result.outcome is Outcome.COMPILE_ERROR
    assert "TFLite programs do not return updated variables" in result.record.message


def test_expected_failures_apply_per_backend(place):
    (place / "faulty.toml").write_text(FAULTY.replace("output=1", "output=0"))
    (place / "test_simple.py").write_text(SIMPLE)
    entry = '[[run]]\ncases = "SimpleArithmeticModule/*"\nflow = "{}"\noutcome = "FAIL"\nreason = "flips bits"\n'
    (place / "expected.toml").write_text(entry.format("board:faulty.toml"))
    words = ["--target_backends=iree_llvmcpu,board:faulty.toml"]
    done = python("-m", "pytest", "-q", "-rx", "-p", "no:cacheprovider", "test_simple.py", *words)
    assert done.returncode == 0 and "1 xfailed" in done.stdout and "flips bits" not in done.stderr, done.stdout
    alone = python("test_simple.py", *words)
    assert alone.returncode == 0 and "skipped=1" in alone.stderr, alone.stderr
    (place / "expected.toml").write_text(entry.format("iree_llvmcpu"))
    strict = python("test_simple.py", *words)
    assert strict.returncode == 1
    assert "iree_llvmcpu: XPASS" in strict.stderr and "board:faulty.toml: FAIL" in strict.stderr


def test_trace_suggests_call_for_keras_predict():
    def make():
        return tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])

    def called(module):
        module.call(uniform([1, 4]), rtol=1e-5)

    with pytest.raises(UsageError, match="loop over batches") as refused:
        compare_backends(called, make, exported_names=["predict"])
    assert "exported_names=['call']" in refused.value.hint
    [result] = compare_backends(called, make, exported_names=["call"])
    assert result.outcome is Outcome.PASS, result.lines()


def test_trace_rejects_unknown_methods_and_skips_missing_device():
    def called(module):
        module.get()

    passed, skipped = compare_backends(called, Counter, target_backends="iree_llvmcpu,iree_cuda")
    assert (passed.outcome, skipped.outcome) == (Outcome.PASS, Outcome.SKIP)
    assert "IREE device cuda not found" in skipped.record.message and not skipped.folder.exists()
    with pytest.raises(UsageError, match="method 'got' in exported_names not found"):
        compare_backends(called, Counter, exported_names=["got"])
    with pytest.raises(UsageError, match=r"does not define a public tf\.function"):
        compare_backends(called, Empty)
    with pytest.raises(AttributeError, match=r"method 'get' not found in Counter: .*exported methods: add"):
        compare_backends(called, Counter, exported_names=["add"])

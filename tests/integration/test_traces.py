"""Trace files of models: contents, reruns and reports, with unittest and pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from referencing import Registry, Resource
from support.models import DIGITS

from hil.controller.pipeline.settings.flagfiles import parse_flagfile
from hil.core.results import Outcome
from hil.errors import NotRun, UsageError
from hil.formats.iree_command import own_tool
from hil.testing import (
    BackendInfo,
    CompiledModule,
    IreeCompiledModule,
    ModelFile,
    Trace,
    compare_backends,
    ndarange,
    uniform,
)
from hil.traces import compile as compile_for

MODULE = """
func.func @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func @split(%x: tensor<4xi32>) -> (tensor<4xi32>, tensor<4xi1>) {
  %zero = arith.constant dense<0> : tensor<4xi32>
  %0 = arith.subi %zero, %x : tensor<4xi32>
  %1 = arith.cmpi sgt, %x, %zero : tensor<4xi32>
  return %0, %1 : tensor<4xi32>, tensor<4xi1>
}
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
TESTS = """
import hil.testing
from hil.testing import ModelFile, TracedModuleTestCase, compile_module, ndarange, uniform


class Module:
    twice = ModelFile("module.mlir", "twice")
    split = ModelFile("module.mlir", "split")


@compile_module(Module)
class ModuleTest(TracedModuleTestCase):
    def test_twice(self):
        def doubled(module):
            module.twice(module.twice(uniform([4])))

        self.compare_backends(doubled)

    def test_split(self):
        def halved(module):
            module.split(ndarange([4], "int32"))

        self.compare_backends(halved)


if __name__ == "__main__":
    hil.testing.main()
"""


class Digits:
    predict = ModelFile(DIGITS / "digits_cnn.onnx")


@pytest.fixture(autouse=True)
def place(tmp_path, shared_cache, monkeypatch) -> Path:
    """A directory with the model, and a cache shared by the tests."""
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module.mlir").write_text(MODULE)
    (tmp_path / "faulty.toml").write_text(FAULTY)
    return tmp_path


@pytest.fixture
def module(place) -> type:
    return type("Module", (), {name: ModelFile(place / "module.mlir", name) for name in ("twice", "split")})


@pytest.fixture
def python(place) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a directory with TESTS."""
    (place / "test_module.py").write_text(TESTS)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, env=environment)

    return run


def valid(document: Any, verb: str) -> None:
    """Validate the --json output of a command."""
    folder = Path(__file__).parents[2] / "docs"
    schemas = [(path.name, json.loads(path.read_text())) for path in folder.glob("*.schema.json")]
    registry = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in schemas)
    schema = {"$ref": f"commands.schema.json#/$defs/{verb.replace(' ', '%20')}"}
    jsonschema.Draft202012Validator(schema, registry=registry).validate(document)


def split(module):
    module.twice(uniform([4]))
    found = module.split(ndarange([4], np.int32) - 1)
    assert next(iter(found.values())).tolist() == [1, 0, -1, -2]


@pytest.mark.slow
@pytest.mark.daily
def test_compare_backends_finds_wrong_board_and_saves_traces(place, module):
    backends = ["iree_llvmcpu", "board:faulty.toml", "iree_cuda", "tflite"]
    good, bad, *others = compare_backends(split, module, target_backends=backends)
    assert (good.outcome, bad.outcome) == (Outcome.PASS, Outcome.FAIL)
    # An unsupported backend ends only its own run.
    assert [one.outcome for one in others] == [Outcome.SKIP, Outcome.SKIP]
    assert "IREE device cuda not found" in others[0].record.message and "mlir" in others[1].record.message
    assert not any(one.folder.exists() for one in others)
    assert bad.record.message.startswith("call 1 (split): output 0.")
    assert "1 of 4 values differs" in bad.record.message
    assert (bad.record.flow, bad.record.id) == ("board:faulty.toml", "Module/split")
    folder = place / "hil-traces" / "Module"
    for backend in ("iree-llvm-cpu_ref", "iree_llvmcpu", "board_faulty.toml"):
        assert len(Trace.load(folder / backend / "traces" / "split").calls) == 2
    assert "WRONG" in (bad.folder / "log.txt").read_text() and "WRONG" not in (good.folder / "log.txt").read_text()
    kept = [json.loads((one.folder / "comparison.json").read_text()) for one in (good, bad)]
    assert [(one["outcome"], one["reason"]) for one in kept] == [("PASS", ""), ("FAIL", bad.record.message)]
    assert [call["outcome"] for one in kept for call in one["calls"]] == ["PASS", "PASS", "PASS", "FAIL"]


@pytest.mark.slow
def test_trace_run_works_after_directory_move(hil, place, module):
    compare_backends(split, module, target_backends="iree_llvmcpu")
    (place / "hil-traces").rename(place / "elsewhere")
    trace = place / "elsewhere" / "Module" / "iree_llvmcpu" / "traces" / "split"
    again = hil("trace", "run", trace, "--runtime-hw-type", "sim", "--json")
    assert again.code == 0, again.err
    assert [case["outcome"] for case in again.document["cases"]] == ["PASS", "PASS"]
    typed = f"hil trace run {trace} --runtime-hw-type sim"
    assert again.document["command"] == typed == Trace.load(Path(again.document["folder"]) / "trace").command
    wrong = hil("trace", "run", trace, "--board", "faulty.toml", "--json")
    assert wrong.code == 1 and [case["outcome"] for case in wrong.document["cases"]] == ["PASS", "FAIL"]
    reference = trace.parents[2] / "iree-llvm-cpu_ref"
    assert hil("trace", "compare", again.document["id"], reference).code == 0
    compared = hil("trace", "compare", wrong.document["id"], reference, "--json")
    (found,) = compared.document["traces"]
    assert compared.code == 1 and [one["outcome"] for one in found["calls"]] == ["PASS", "FAIL"]
    shown = hil("trace", "show", trace, "--json")
    assert shown.document["calls"][1]["program"]["function"] == "split"
    for ended, verb in ((again, "run"), (compared, "compare"), (shown, "show")):
        valid(ended.document, f"trace {verb}")
    done = subprocess.run(
        [own_tool("iree-run-module"), "--flagfile=flagfile"], cwd=trace, capture_output=True, text=True
    )
    assert done.returncode == 0 and "[SUCCESS]" in done.stdout, done.stdout
    assert hil("trace", "show", place).code == 2


@pytest.mark.slow
def test_compile_for_builds_module_for_backend(place, module):
    with compile_for(module, "iree_vmvx", artifacts_dir="made") as compiled:
        x = np.arange(4, dtype=np.float32)
        assert compiled.twice(x).tolist() == [0, 2, 4, 6]
        with pytest.raises(AttributeError, match=r"method 'trice' not found .* methods: twice, split"):
            compiled.trice(x)
        with pytest.raises(UsageError, match="it has 2 methods"):
            compiled(x)
    assert (place / "made" / "Module" / "iree_vmvx" / "twice" / "twice.vmfb").is_file()
    with pytest.raises(NotRun, match="IREE device cuda not found"):
        compile_for(module, "iree_cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iree_vmvx", "iree_vmla"])
def test_names_of_iree_tests_compile_module(place, module, name):
    backend = BackendInfo(name)
    made = (
        backend.compile(module, ["twice"]),
        IreeCompiledModule(module, backend, exported_names=["twice"], artifacts_dir="made"),
    )
    for compiled in made:
        with compiled:
            assert isinstance(compiled, CompiledModule)
            assert compiled(np.float32([1, 2, 3, 4])).tolist() == [2, 4, 6, 8]
    assert (place / "made" / "Module" / "iree_vmvx").is_dir()
    with pytest.raises(UsageError, match="iree_vmlaa"):
        BackendInfo("iree_vmlaa").compile(module)


@pytest.mark.slow
def test_compare_backends_checks_onnx_model_with_onnxruntime():
    def predicted(module):
        module.predict(uniform([1, 1, 8, 8]))

    [result] = compare_backends(predicted, Digits)
    assert result.outcome is Outcome.PASS, result.lines()
    assert result.record.against.startswith("onnxruntime")
    assert {path.name for path in (result.folder.parents[1]).iterdir()} >= {"compiled.vmfb", "traces"}


@pytest.mark.slow
def test_trace_call_reruns_with_iree_tools_and_hil(hil, module, simulator):
    [result] = compare_backends(split, module)
    for file in (result.folder / "flagfile", result.folder / "flagfile_call_1"):
        there: dict[str, Any] = {"cwd": file.parent, "capture_output": True, "text": True, "timeout": 120}
        benchmark = [own_tool("iree-benchmark-module"), f"--flagfile={file.name}", "--benchmark_min_time=2x"]
        done = subprocess.run(benchmark, **there)
        assert done.returncode == 0 and "BM_" in done.stdout, done.stderr
        done = subprocess.run([own_tool("iree-run-module"), f"--flagfile={file.name}"], **there)
        assert done.returncode == 0 and "[SUCCESS]" in done.stdout, done.stdout
    flags = ("--flagfile", result.folder / "flagfile", "--iterations", 5)
    ended = hil("bench", *flags, "--json")
    assert ended.code == 0, ended.err
    side = ended.document["sides"][0]
    assert side["outcome"] == "PASS" and side["times"]["iterations"] == 5
    assert hil("bench", *flags, "--board", simulator).code == 0
    # The warm-up checks the measured call, and later flags override earlier ones.
    wrong = hil("bench", *flags, "--expected_output=4xf32=1 2 3 4", "--json")
    assert wrong.code == 1 and wrong.document["sides"][0]["times"] is None
    # IREE tools append input flags. Here a later flag replaces all earlier ones.
    other = hil("bench", *flags, "--input=4xf32=1", "--expected_output=4xf32=2")
    assert other.code == 0, other.out
    refused = hil("bench", *flags, "--device=cuda")
    assert refused.code == 2 and "use hil's --device NAME" in refused.err
    assert parse_flagfile(result.folder / "flagfile").device == "local-task"


def test_bench_requires_model_or_flagfile(hil):
    assert hil("bench").code == 2
    ended = hil("bench", "model.onnx", "--itertions=3")
    assert ended.code == 2 and "--iterations" in ended.err
    assert hil("bench", "--flagfile", "none").code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rx"), ()], ids=["pytest", "alone"]
)
def test_expected_failures_apply_per_backend(python, place, words):
    entry = '[[run]]\ncases = "Module/halved"\nflow = "board:*"\noutcome = "FAIL"\nreason = "flips bits"\n'
    (place / "expected.toml").write_text(entry)
    call = (*words, "test_module.py", "--artifacts_dir=made", "--target_backends=iree_llvmcpu,board:faulty.toml")
    call += ("--junitxml=rows.xml",) if words else ()
    done = python(*call)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("1 passed, 1 xfailed" if words else "OK (skipped=1)") in done.stdout + done.stderr
    assert (place / "made" / "Module" / "board_faulty.toml" / "traces" / "halved" / "log.txt").is_file()
    again = Trace.load(place / "made" / "Module" / "iree_llvmcpu" / "traces" / "halved").command
    options = "--target_backends=iree_llvmcpu,board:faulty.toml"
    assert again == (
        f"pytest test_module.py::ModuleTest::test_split {options} --artifacts_dir=made"
        if words
        else f"python test_module.py --artifacts_dir=made {options}"
    )
    if not words:
        return
    rows = {case.get("name"): [one.tag for one in case] for case in ElementTree.parse("rows.xml").iter("testcase")}
    assert rows["test_twice[doubled-iree_llvmcpu]"] == [] and rows["test_split[halved-board_faulty.toml]"] == [
        "skipped"
    ]
    (place / "expected.toml").write_text(entry.replace("board:*", "*").replace("halved", "*"))
    strict = python(*call)
    assert strict.returncode == 1 and "2 failed" in strict.stdout
    # One report covers all backends of a trace.
    assert "iree_llvmcpu: XPASS" in strict.stdout and "board:faulty.toml: XFAIL" in strict.stdout
    assert "Module/doubled: 2 of 2 backends failed" in strict.stdout


@pytest.mark.parametrize("words", [("-m", "pytest", "-p", "no:cacheprovider"), ()], ids=["pytest", "alone"])
def test_trace_rejects_unknown_backend_before_running(python, words):
    done = python(*words, "test_module.py", "--target_backends=iree_llvmjit")
    said = done.stdout + done.stderr
    assert done.returncode in (2, 4) and "unknown backend 'iree_llvmjit'" in said and "Traceback" not in said
    assert "did you mean 'iree_llvmcpu'" in said


@pytest.mark.slow
def test_project_option_takes_precedence_over_plugin_option(python, place):
    option = "'--target_backends', nargs='*', default=['ours']"
    (place / "conftest.py").write_text(f"def pytest_addoption(parser):\n    parser.addoption({option})\n")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_module.py")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    (place / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--artifacts_dir')\n")
    (place / "test_module.py").write_text(
        "def test_it(pytestconfig):\n    assert pytestconfig.option.artifacts_dir == 'mine'\n"
    )
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--artifacts_dir=mine", "--target_backends=tf")
    assert done.returncode == 0, done.stdout + done.stderr


def test_compile_error_includes_reproduce_script(place, module):
    (place / "odd.toml").write_text(FAULTY.replace("target-cpu=host", "target-cpu=abacus"))
    [result] = compare_backends(split, module, target_backends="board:odd.toml")
    assert result.outcome is Outcome.COMPILE_ERROR and "'abacus'" in result.record.message
    script = place / "hil-traces" / "Module" / "board_odd.toml" / "twice" / "reproduce.sh"
    assert str(script) in result.record.hint
    again = subprocess.run(["sh", script], capture_output=True, text=True, timeout=120)
    assert "'abacus' is not a recognized processor" in again.stderr


def test_compare_backends_rejects_untraceable_functions(module):
    def called(module):
        module.twice(ndarange([3]))

    def typed(module):
        module.twice(3.0)

    def nothing(module):
        return None

    for function, said in (
        (called, "argument 0 of twice: expected"),
        (typed, "argument 0 of twice must be an array, got float"),
        (nothing, "nothing called no methods"),
    ):
        with pytest.raises(UsageError, match=said):
            compare_backends(function, module)
    with pytest.raises(UsageError, match="backend tf runs only TensorFlow modules"):
        compare_backends(split, module, reference_backend="tf")
    with pytest.raises(UsageError, match="method 'thrice' not found in"):
        compare_backends(split, module, exported_names=["thrice"])
    with pytest.raises(UsageError, match=r"trace function .* requires a name"):
        compare_backends(lambda module: None, module)


@pytest.mark.slow
def test_module_with_mutable_globals_reports_uncompared_state(hil, place):
    (place / "count.mlir").write_text("""
util.global private mutable @count = dense<1.0> : tensor<4xf32>
func.func @add(%x: tensor<4xf32>) -> tensor<4xf32> {
  %before = util.global.load @count : tensor<4xf32>
  %now = arith.addf %before, %x : tensor<4xf32>
  util.global.store %now, @count : tensor<4xf32>
  return %x : tensor<4xf32>
}
""")
    given = ["--input", "4xf32=1", "--expected", "4xf32=1"]
    ended = hil("run", "count.mlir", *given, "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.out
    assert "keeps state between runs (count)" in ended.case["reason"]
    counting = type("Counting", (), {"add": ModelFile(place / "count.mlir")})

    def added(module):
        module.add(uniform([4]))

    [result] = compare_backends(added, counting)
    assert result.outcome is Outcome.PASS and "keeps state between runs (count)" in "".join(result.lines())
    shown = hil("run", "count.mlir", *given)
    assert "hil compares only the outputs, not this state" in " ".join(shown.out.split())


def test_examples_need_only_pytest_extra():
    """The README runs them from a checkout with only hil and pytest installed, without development tools."""
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "examples/tensorflow"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "hil.testing.pytest_plugin"}
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr

"""The pytest plugin on simulators: pytest runs in a user's project directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.models import save_model
from support.plugin_runs import DIGITS_LAYERS, Project, save_open, save_small
from support.slow import slow_except

from hil.controller.analysis.profile.store import read_profile
from hil.controller.workloads.suites.store import SuiteRun


@pytest.fixture
def project(tmp_path: Path, sharing_environment: dict[str, str]) -> Project:
    return Project(tmp_path / "project", sharing_environment)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save_small(tmp_path)


SMALL = ["small_full_model-sim", "small_layer_Relu_relu-sim", "small_layer_Add_add-sim"]


@pytest.mark.daily
def test_plugin_needs_only_ini_file_and_model(project):
    project.set_up("digits_cnn", where=".")
    tested = project.test("--runtime-hw-type=sim", "-k", "digits")
    assert tested.code == 0, tested.out
    assert len(tested.outcomes) == 1 + DIGITS_LAYERS
    assert set(tested.outcomes.values()) == {"passed"}
    assert "digits_cnn_full_model-sim" in tested.outcomes
    assert "digits_cnn_layer_Conv_conv1-sim" in tested.outcomes
    told = tested.properties["digits_cnn_layer_Conv_conv1-sim"]
    assert told["hil_outcome"] == "PASS" and told["hil_board"] == "sim" and told["hil_op"] == "Conv"
    assert float(told["hil_run_s"]) > 0 and float(told["hil_device_p50_ns"]) > 0
    assert {one.name for one in project.folder.iterdir()} == {"pytest.ini", "digits_cnn.onnx", "junit.xml"}


@pytest.mark.slow
def test_collection_lists_cases_per_model_without_board(project, small):
    project.set_up(small)
    tested = project.test("--collect-only", "-q", "--board", "root@10.231.255.1", "--runtime-hw-type", "sim-undeclared")
    assert tested.code == 0, tested.out
    assert tested.out.split()[:3] == [f"models/small.onnx::{name}-undeclared" for name in SMALL]
    # Layers and hardware types are part of the name, so -k and node ids select by them.
    chosen = project.test(f"models/small.onnx::{SMALL[1]}")
    assert list(chosen.outcomes) == [SMALL[1]] and chosen.code == 0
    assert list(project.test("--hil-no-layers", "-k", "sim").outcomes) == [SMALL[0]]


@pytest.mark.slow
def test_plugin_finds_models_from_any_directory(project, small):
    project.set_up(small, where="build/nets", ini="testpaths = tests")
    inside = project.write("tests/test_plain.py", "def test_plain(): pass\n").parent
    assert set(project.test(cwd=inside).outcomes) == {"test_plain", *SMALL}
    assert "4 tests collected" in project.test("--collect-only").out
    # A path on the command line selects only that path.
    assert "1 test collected" in project.test("--collect-only", "tests").out


def test_mismatch_fails_test_and_prints_working_commands(project):
    project.set_up("digits_cnn")
    tested = project.test("--runtime-hw-type", "sim-undeclared", "-k", "full", "--hil-seed", "3")
    assert tested.code == 1
    assert tested.outcomes == {"digits_cnn_full_model-sim-undeclared": "failure"}
    assert "mismatches" in tested.out and "SQNR dB" in tested.out and "logits" in tested.out
    assert "assert" not in tested.out and "hil_compare()" not in tested.out
    assert tested.properties["digits_cnn_full_model-sim-undeclared"]["hil_outcome"] == "FAIL"
    repeat, diff = tested.command("repeat it"), tested.command("see the diff")
    assert "--hil-seed=3" in repeat and "--runtime-hw-type=sim-undeclared" in repeat
    again = project.shell(repeat)
    assert again.returncode == 1 and "1 failed" in again.stdout, again.stdout + again.stderr
    seen = project.shell(diff)
    assert seen.returncode == 1 and "10 of 10" in seen.stdout, seen.stdout + seen.stderr
    assert list((project.folder / ".hil").rglob("diff.png"))
    # Version control ignores the stored files.
    assert (project.folder / ".hil" / ".gitignore").read_text() == "*\n"
    exact = project.test("--runtime-hw-type", "sim-undeclared", "-k", "full", "--hil-rtol", "0", "--hil-atol", "0")
    assert "--hil-rtol=0.0 --hil-atol=0.0" in exact.command("repeat it")
    wider = project.test(
        "--runtime-hw-type", "sim-undeclared", "-k", "full", "--hil-rtol", "0.05", "--hil-atol", "0.05"
    )
    assert wider.code == 0, wider.out
    assert not list((project.folder / ".hil").rglob("*.npy")), "a test that passes removes the files of its failure"


@pytest.mark.slow
def test_runtimes_are_targets(project, small):
    project.set_up(small)
    tested = project.test("--hil-runtime=onnxruntime", "--hil-runtime=iree", "--hil-no-layers")
    assert tested.code == 0, tested.out
    names = {name: told["hil_runtime"] for name, told in tested.properties.items()}
    assert names == {"small_full_model-onnxruntime-sim": "onnxruntime", "small_full_model-iree-sim": "iree"}


@pytest.mark.slow
def test_options_of_suites_apply(project, small):
    project.set_up(small)
    words = ("--hil-no-layers", "--hil-runtime=onnxruntime", "--hil-input-range=5:6", "--hil-keep-all")
    tested = project.test(*words)
    assert tested.code == 0, tested.out
    inputs = [np.load(path) for path in sorted(project.folder.glob(".hil/**/inputs/*.npy"))]
    assert len(inputs) == 2 and all(one.min() >= 5 and one.max() <= 6 for one in inputs)
    bad = project.test("--hil-no-layers", "--hil-compile-flag=--no-such-flag")
    assert bad.code == 1 and "--no-such-flag" in bad.out
    assert bad.properties[SMALL[0]]["hil_outcome"] == "COMPILE_ERROR"
    assert "--hil-compile-flag=--no-such-flag" in bad.command("repeat it")
    both = project.test("--hil-sandbox", "--hil-no-sandbox")
    assert both.code == 4 and "mutually exclusive" in both.out


def test_faults_are_injected_and_mismatches_confirmed(project, small):
    project.set_up(small)
    words = ("--hil-no-layers", "--hil-runtime=onnxruntime", "--hil-fault=corrupt", "--hil-fresh", "--hil-confirm=2")
    tested = project.test(*words, "--hil-out=out")
    assert tested.code == 1 and tested.properties[SMALL[0]]["hil_outcome"] == "FAIL", tested.out
    (line,) = next((project.folder / "out").rglob("results.jsonl")).read_text().splitlines()
    case = json.loads(line)
    assert case["confirmed"] == "always wrong" and "(always wrong)" in tested.out
    assert [one["why"] for one in case["attempts"]] == ["confirm", "confirm"]
    assert "--hil-fault=corrupt" in tested.command("repeat it")


@pytest.mark.slow
def test_project_file_criteria_apply_unless_overridden(project):
    project.set_up("digits_cnn")
    project.write("hil.toml", '[models."digits_*.onnx".outputs."logits"]\naccept = ["argmax", "kl<=1e-3"]\n')
    words = ("--runtime-hw-type", "sim-f16", "-k", "full")
    assert project.test(*words).code == 0
    tested = project.test(*words, "--hil-accept", "logits: max_abs<=1e-6")
    assert tested.code == 1 and "max_abs<=1e-06 is not met" in tested.out


@pytest.mark.slow
def test_default_value_on_command_line_overrides_project_file(project, small):
    project.set_up(small)
    project.write("hil.toml", "[defaults]\niterations = 3\n")
    words = ("--hil-no-layers", "--hil-runtime=onnxruntime")
    counts = [
        project.test(*words, *more).properties[SMALL[0]]["hil_iterations"] for more in ((), ("--hil-iterations=1",))
    ]
    assert counts == ["3", "1"]


@pytest.mark.parametrize(("words", "flows"), [((), "iree, onnxruntime"), (("--hil-flow", "iree"), "iree")])
def test_project_file_sets_runtime_unless_flow_is_given(project, small, words, flows):
    project.set_up(small, "digits_cnn")
    project.write("hil.toml", '[models."digits_*.onnx"]\nruntime = "onnxruntime"\n')
    tested = project.test("--collect-only", "--hil-no-layers", *words)
    assert f"hil: flow {flows} on " in tested.out, tested.out


def test_failure_before_comparison_reports_stage(project, tmp_path):
    project.set_up("digits_cnn")
    (project.models / "cut.onnx").write_bytes((project.models / "digits_cnn.onnx").read_bytes()[:3000])
    node = helper.make_node("MaxRoiPool", ["x", "where"], ["y"], "pool", pooled_shape=[1, 1])
    values = [("x", TensorProto.FLOAT, [1, 1, 4, 4]), ("where", TensorProto.FLOAT, [1, 5])]
    project.set_up(save_model(tmp_path / "roi.onnx", [node], values, [("y", TensorProto.FLOAT, [1, 1, 1, 1])]))
    project.write("small.toml", '[board]\nhw_type = "tight"\n[simulator]\nmemory_limit = 1000\n')
    tested = project.test("-k", "full", "--board", "sim", "--board", "small.toml")
    assert tested.code == 1
    assert tested.outcomes.pop("digits_cnn_full_model-sim") == "passed"
    assert set(tested.outcomes.values()) == {"error"} and len(tested.outcomes) == 5
    ends = {name: (told["hil_stage"], told["hil_outcome"]) for name, told in tested.properties.items()}
    assert ends["cut_full_model-sim"] == ("import", "IMPORT_ERROR")
    assert ends["roi_full_model-sim"] == ("compile", "COMPILE_ERROR")
    assert ends["digits_cnn_full_model-tight"] == ("load", "LOAD_ERROR")
    for stage in ("import", "compile", "load"):
        assert f"  stage: {stage}" in tested.out
    assert "  board: small" in tested.out and "hint: " in tested.out


@pytest.mark.slow
def test_lost_board_gives_error_and_next_test_reconnects(project, small):
    project.set_up(small)
    project.write("falls.toml", '[board]\nhw_type = "falls"\n[simulator]\nfaults = ["kill-agent"]\n')
    tested = project.test("--board", "falls.toml")
    assert tested.code == 1
    assert list(tested.outcomes.values()) == ["error"] * 3
    assert [told["hil_outcome"] for told in tested.properties.values()] == ["BOARD_LOST"] * 3
    assert [told["hil_stage"] for told in tested.properties.values()] == ["run"] * 3
    # The first test reports the full error. The rest report the cause and the repeat command. (A dead agent shows up as
    # a missing response or an ended stream: each is reported once.)
    assert 1 <= tested.out.count("  stage: run") < 3 and tested.out.count("repeat it: ") == 3


OWN = """
import dataclasses
import numpy as np
import pytest

@pytest.mark.hil(models="digits*", layers=False)
def test_shape(hil_result, hil_case):
    assert hil_result.outputs["logits"].shape == (1, 10)
    assert hil_case.spec.model == "digits_cnn"

@pytest.mark.hil(ops="Conv")
def test_stages(hil_model, hil_artifact, hil_board, hil_inputs, hil_verdict, hil_compare):
    assert hil_verdict and hil_compare()
    assert [spec.name for spec in hil_model.inputs] == list(hil_inputs)
    assert hil_artifact.runtime == "iree" and hil_board.name == "sim"

@pytest.mark.hil(models="small", layers=False)
class TestSmall:
    def test_own_reference(self, hil_result, hil_reference, hil_compare):
        def changed(by):
            outputs = {name: value + np.float32(by) for name, value in hil_reference.outputs.items()}
            return dataclasses.replace(hil_reference, outputs=outputs)
        assert hil_compare(hil_result, changed(1e-3), atol=1e-2)
        hil_compare(hil_result, changed(1), atol=1e-2)

    def test_own_words(self, hil_result):
        assert hil_result.source == "nobody"

def test_every_case(hil_verdict):
    assert hil_verdict
"""


@pytest.mark.slow
def test_user_tests_can_request_any_stage(project, small):
    project.set_up("digits_cnn", small)
    project.write("test_own.py", OWN)
    tested = project.test("test_own.py")
    names = {f"digits_cnn_layer_Conv_conv{number}-sim" for number in (1, 2)}
    assert {name for name in tested.outcomes if "stages" in name} == {f"test_stages[{name}]" for name in names}
    wrong = {"test_own_reference[small_full_model-sim]", "test_own_words[small_full_model-sim]"}
    assert {name for name, end in tested.outcomes.items() if end != "passed"} == wrong, tested.out
    assert {tested.outcomes[name] for name in wrong} == {"failure"}
    assert len(tested.outcomes) == 1 + 2 + 2 + (1 + DIGITS_LAYERS + 3)
    assert "test_own.py::TestSmall::test_own_reference[small_full_model-sim]" in tested.command("repeat it", 0)
    assert "4 of 4" in project.shell(tested.command("see the diff")).stdout
    again = project.shell(tested.command("repeat it", 1))
    assert "test_own_words" in again.stdout and "1 failed" in again.stdout


@pytest.mark.slow
def test_allow_blind_applies_to_user_tests(project, small):
    project.set_up(small)
    project.write(
        "test_it.py",
        "import dataclasses, numpy as np\n"
        "def test_it(hil_result, hil_compare):\n"
        "    nan = {name: value * np.float32(np.nan) for name, value in hil_result.outputs.items()}\n"
        "    nothing = dataclasses.replace(hil_result, outputs=nan)\n"
        "    hil_compare(nothing, nothing, rtol=1e-3)\n",
    )
    tested = project.test("test_it.py", "-k", "small_full")
    assert set(tested.outcomes.values()) == {"failure"} and "no number was compared" in tested.out
    allowed = project.test("test_it.py", "-k", "small_full", "--hil-allow-blind", "y")
    assert set(allowed.outcomes.values()) == {"passed"}, allowed.out


@pytest.mark.slow
def test_user_can_override_fixtures(project, small):
    project.set_up(small)
    project.write(
        "conftest.py",
        "import numpy as np, pytest\n"
        "@pytest.fixture\n"
        "def hil_inputs(hil_model):\n"
        "    return {spec.name: np.full(spec.shape, 7, np.float32) for spec in hil_model.inputs}\n",
    )
    project.write(
        "test_it.py", "def test_it(hil_result, hil_reference):\n    assert set(hil_result.outputs['y']) == {14}\n"
    )
    tested = project.test("-k", "small_full")
    assert tested.code == 0, tested.out
    assert set(tested.outcomes) == {"test_it[small_full_model-sim]", "small_full_model-sim"}


def test_user_reference_fixture_judges_cases(project, small):
    project.set_up(small)
    project.write(
        "conftest.py",
        "import numpy as np, pytest\n"
        "from hil.core.results import RunResult\n"
        "@pytest.fixture\n"
        "def hil_reference(hil_model):\n"
        "    return RunResult('mine', {one.name: np.full(one.shape, -1, np.float32) for one in hil_model.outputs})\n",
    )
    project.write(
        "test_it.py", "def test_it(hil_verdict):\n    assert hil_verdict.against == 'mine' and not hil_verdict\n"
    )
    tested = project.test("-k", "small_full")
    assert tested.outcomes == {"test_it[small_full_model-sim]": "passed", "small_full_model-sim": "failure"}, tested.out
    assert "mine" in tested.out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("@pytest.mark.hil(layer=False)\ndef test_it(hil_result): pass", "layer=False"),
        ("@pytest.mark.hil('digits')\ndef test_it(hil_result): pass", "'digits'"),
    ],
)
def test_plugin_rejects_invalid_marker(project, small, source, said):
    project.set_up(small)
    project.write("test_it.py", f"import pytest\n{source}\n")
    tested = project.test("test_it.py")
    assert tested.code == 2 and said in tested.out


def test_expected_failures_are_xfail_and_strict(project, small):
    project.set_up("digits_cnn", small)
    project.write(
        "models/expected.toml",
        """
[[run]]
cases = "digits_cnn_full_model"
outcome = "FAIL"
reason = "half precision"
issue = "https://example.com/7"

[[run]]
cases = ["small_layer_*", "gone_*"]
outcome = "FAIL"
reason = "was wrong once"
""",
    )
    tested = project.test("--runtime-hw-type", "sim-undeclared", "-k", "full or small", "-rx")
    assert tested.code == 1
    assert tested.outcomes == {
        "digits_cnn_full_model-sim-undeclared": "skipped",
        "small_full_model-sim-undeclared": "passed",
        "small_layer_Relu_relu-sim-undeclared": "failure",
        "small_layer_Add_add-sim-undeclared": "failure",
    }
    assert "1 xfailed" in tested.out and "half precision" in tested.out and "https://example.com/7" in tested.out
    assert "XPASS: " in tested.out and "was wrong once" in tested.out
    assert tested.properties["digits_cnn_full_model-sim-undeclared"]["hil_outcome"] == "XFAIL"
    assert "gone_*" in tested.out, "what matches no case is told"
    only = project.test("--runtime-hw-type", "sim-undeclared", "--hil-only-expected-failures", "--collect-only", "-q")
    assert "3/" in only.out and "small_full" not in only.out
    strict = project.test("--runtime-hw-type", "sim-undeclared", "-k", "full and digits", "--runxfail")
    assert strict.outcomes == {"digits_cnn_full_model-sim-undeclared": "failure"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--hil-flow", "nope"],
        ["--board", "nope"],
        ["--hil-rtol", "2"],
        ["-o", "hil_models=nowhere"],
    ],
)
def test_plugin_rejects_invalid_options_before_running(project, small, args):
    project.set_up(small)
    tested = project.test(*args)
    assert tested.code == 4
    assert tested.outcomes == {} and "error" in tested.out.lower()


def test_plugin_rejects_invalid_expected_failures_file(project, small):
    project.set_up(small)
    project.write("models/expected.toml", "[[run]]\ncases = 3\n")
    tested = project.test()
    assert tested.code == 4 and "expected.toml" in tested.out


SHAPES = """
def test_shape(hil_inputs, hil_case):
    assert hil_inputs["x"].shape == (3,)
"""


@pytest.mark.slow
def test_dim_option_sets_symbolic_dimension(project, small, tmp_path):
    project.set_up(small, save_open(tmp_path))
    project.write("test_shape.py", f"import pytest\n\n@pytest.mark.hil(models='open'){SHAPES}")
    tested = project.test("--hil-dim", "N=3", "--runtime-hw-type", "sim")
    assert tested.code == 0, tested.out
    assert {"open_full_model-sim", "small_full_model-sim", "test_shape[open_layer_Relu_relu-sim]"} <= set(
        tested.outcomes
    )
    other = project.test("--hil-dim", "N=5", "test_shape.py", "-k", "full")
    assert other.code == 1 and "--hil-dim=N=5" in other.command("repeat it")


@pytest.mark.slow
def test_range_of_sizes_makes_case_of_each_edge(project, small, tmp_path):
    project.set_up(small, save_open(tmp_path))
    tested = project.test("--hil-dim", "N=1..3", "--runtime-hw-type", "sim", "-k", "full")
    assert tested.code == 0, tested.out
    names = {f"open_N-{size}_full_model-sim" for size in (1, 2, 3)}
    assert names | {"small_full_model-sim"} == set(tested.outcomes)


@pytest.mark.slow
def test_plugin_rejects_size_of_unknown_dimension(project, small, tmp_path):
    project.set_up(small, save_open(tmp_path))
    tested = project.test("--hil-dim", "M=3")
    assert tested.code == 2 and "--hil-dim M: none of " in tested.out
    assert "dimension not found in" in tested.out and "symbolic dimensions: N" in tested.out
    assert project.test("--hil-dim", "N").code == 4


WRITTEN = {"results.jsonl", "results.csv", "outputs.csv", "junit.xml", "summary.md", "report.html", "suite.json"}


@pytest.mark.parametrize("workers", slow_except([[], ["-n", "2"]], 1), ids=["alone", "xdist"])
def test_plugin_writes_same_files_as_suite_run(project, small, hil, workers):
    project.set_up("digits_cnn", small)
    project.write("models/expected.toml", '[[run]]\ncases = "small_layer_*"\noutcome = "FAIL"\nreason = "once"\n')
    asked = ["-k", "full or small", "--board", "sim", "--board", "sim-undeclared", "--hil-out", "an out", *workers]
    tested = project.test(*asked)
    assert tested.code == 1
    for hw_type, whole in (("sim", "PASS"), ("sim-undeclared", "FAIL")):
        folder = project.folder / "an out" / "models" / hw_type
        assert {file.name for file in folder.iterdir()} >= WRITTEN
        assert f"open 'an out/models/{hw_type}/report.html'" in tested.out
        head = json.loads((folder / "suite.json").read_text())
        assert head["ids"] == ["digits_cnn_full_model", *(name.removesuffix("-sim") for name in SMALL)]
        assert len(head["suite_ids"]) == len(head["ids"]) + DIGITS_LAYERS
        assert head["exit_code"] == 1 and not head["interrupted"] and head["boards"] == [hw_type]
        found = {record.id: record for record in SuiteRun.open(folder).read_records()}
        assert list(found) == head["ids"]
        assert [record.outcome for record in found.values()] == [whole, "PASS", "XPASS", "XPASS"]
        wrong = found["digits_cnn_full_model"]
        assert wrong.folder == ("" if whole == "PASS" else "cases/digits_cnn_full_model")
        assert wrong.hw_type == hw_type and "-n" not in wrong.repeat
    # Readers of `hil suite run` results can read these.
    assert hil("suite", "report", folder).code == 0
    changes = hil("suite", "expect", folder).out
    assert "+cases = " in changes and "digits_cnn_full_model" in changes and "-cases = " in changes
    ended = hil("suite", "diff", folder.with_name("sim"), folder)
    assert ended.code == 1 and "1 broke" in ended.out
    # A new run replaces the old one. A listing does not.
    assert project.test("--hil-out", "an out", "--collect-only").code == 0
    assert project.test("--hil-out", "an out", "-k", "small_full").code == 0
    assert [record.id for record in SuiteRun.open(folder.with_name("sim")).read_records()] == ["small_full_model"]


def test_interrupted_run_reports_cases_not_run(project, small):
    project.set_up(small)
    project.write("conftest.py", STOPS)
    tested = project.test("--hil-out", "out")
    assert tested.code == 2
    head = json.loads((project.folder / "out/models/sim/suite.json").read_text())
    assert head["interrupted"] and head["exit_code"] == 130 and len(head["ids"]) == 3
    assert "1 of 3 cases not run: interrupted" in (project.folder / "out/models/sim/summary.md").read_text()


STOPS = """
import pytest

def pytest_runtest_setup(item):
    if "Add" in item.name:
        raise KeyboardInterrupt
"""


def test_flow_with_device_runs_on_this_device(project, small):
    project.set_up(small)
    project.write("flows.toml", '[sync]\nruntime = "iree"\ndevice = "local-sync"\n')
    tested = project.test("--hil-flow", "iree", "--hil-flow", "sync", "--hil-no-layers")
    assert tested.code == 0, tested.out
    devices = {told["hil_flow"]: told["hil_placement"] for told in tested.properties.values()}
    assert devices == {"iree": "local-task", "sync": "local-sync"}


@pytest.mark.slow
@pytest.mark.parametrize(("named", "file"), [("flows/mine.toml:fast", "flows/mine.toml"), ("fast", "flows.toml")])
def test_ini_file_resolves_flow_from_project_directory(project, small, named, file):
    project.set_up(small, ini=f"hil_flow = {named}")
    project.write(file, '[fast]\nruntime = "onnxruntime"\n[slow]\nruntime = "iree"\n')
    inside = project.write("tests/test_plain.py", "").parent
    tested = project.test("-k", "full", cwd=inside)
    assert tested.code == 0, tested.out
    assert tested.properties[SMALL[0]]["hil_flow"] == "fast"


@pytest.mark.slow
def test_directories_with_same_name_stay_separate(project):
    project.set_up("digits_cnn", where="../a/nets").set_up("digits_cnn", where="../b/nets")
    project.write("pytest.ini", "[pytest]\nhil_models = ../a/nets ../b/nets ../b/../b/nets\n")
    tested = project.test("-k", "full", "--runtime-hw-type", "sim-undeclared", "--hil-out", "out")
    assert tested.code == 1 and "2 failed" in tested.out, tested.out
    heads = sorted(project.folder.glob("out/*/sim-undeclared/suite.json"))
    sources = [json.loads(head.read_text())["source"] for head in heads]
    assert [Path(source).parent.name for source in sources] == ["a", "b"]
    repeat = tested.command("repeat it", 1)
    again = project.shell(repeat)
    assert "../b/nets/digits_cnn.onnx" in repeat and "1 failed" in again.stdout, again.stdout + again.stderr


@pytest.mark.slow
def test_merge_option_combines_equal_layers(project, tmp_path):
    mixed = save_model(
        tmp_path / "mixed.onnx",
        [helper.make_node("Neg", [a], [b], b) for a, b in (("x", "a"), ("x", "b"), ("b", "c"))],
        [("x", TensorProto.FLOAT, [4])],
        [(name, TensorProto.FLOAT, [4]) for name in ("a", "b", "c")],
    )
    project.set_up(mixed)
    layers = {"content": "ac", "shape": "a", "none": "abc"}
    for merge, names in layers.items():
        tested = project.test("-k", "layer", f"--hil-merge={merge}", "--hil-flow", "onnxruntime")
        assert list(tested.outcomes) == [f"mixed_layer_Neg_{name}-sim" for name in names], tested.out


def test_empty_selection_exits_with_pytest_code_5(project, small):
    assert project.set_up().test().code == 5
    assert project.set_up(small).test("-k", "nothing").code == 5


@pytest.mark.slow
def test_debug_ir_option_writes_intermediate_files(project, small):
    project.set_up(small, ini="hil_flow = iree-O3")
    tested = project.test("-k", "Relu", "--debug-ir", "ir", "--recompute-cache")
    assert tested.code == 0, tested.out
    assert tested.properties[SMALL[1]]["hil_flow"] == "iree-O3"
    assert list((project.folder / "ir" / "small_layer_Relu_relu").rglob("*.mlir"))
    other = project.test(
        "-k", "Relu", "--hil-flow", "onnxruntime", "--hil-layer-inputs", "random", "--hil-group", "fused"
    )
    assert other.code == 0 and other.properties[SMALL[1]]["hil_flow"] == "onnxruntime", other.out


@pytest.mark.slow
def test_profile_options_write_profiles_per_case(project, small):
    project.set_up(small)
    tested = project.test("-k", "Relu", "--hil-profile", "runs", "--hil-compile-time-profile", "compiled")
    assert tested.code == 0, tested.out
    profile = read_profile(project.folder / "runs" / "small_layer_Relu_relu-sim")
    assert {row.iteration for row in profile.rows} == set(range(10))
    assert all(row.onnx_nodes == ("relu",) for row in profile.rows if row.kind == "compute")
    assert (project.folder / "compiled" / "small_layer_Relu_relu-sim" / "passes.csv").exists()


@pytest.mark.slow
def test_capture_off_streams_compiler_output(project, small):
    project.set_up(small)
    live = project.test("-k", "Relu", "--recompute-cache", "-s")
    assert live.code == 0, live.out
    assert "small_layer_Relu_relu: compile | $ " in live.out and "iree-compile" in live.out

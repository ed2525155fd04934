"""`hil suite run`: many cases, several boards, and boards that die."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model
from support.slow import slow_except
from support.suite_runs import suite_head
from support.waiting import eventually

from hil.controller.storage import runs as begun

RUNTIMES = ("onnxruntime", "iree")
OPS = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softplus"]
# Above the largest float16 value: multiplying by it gives infinity.
WEIGHTS = {"small": 2.0, "large": 2.0**16}
REPORTS = ("results.jsonl", "results.csv", "outputs.csv", "junit.xml", "summary.md", "report.html", "suite.json")


def chain(path: Path, ops: list[str], *, size: int = 8) -> Path:
    """A chain of unary operators."""
    nodes = [helper.make_node(op, [f"t{n}"], [f"t{n + 1}"], f"{op.lower()}{n}") for n, op in enumerate(ops)]
    ends = [(name, TensorProto.FLOAT, [size]) for name in ("t0", f"t{len(ops)}")]
    return save_model(path, nodes, ends[:1], ends[1:])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory with a model of six different layers."""
    folder = tmp_path / "models"
    folder.mkdir()
    chain(folder / "net.onnx", OPS)
    return folder


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.daily
@pytest.mark.parametrize("flow", ["onnxruntime", "iree"])
def test_directory_runs_model_and_layers_with_all_reports(hil, simulator, models, tmp_path, flow):
    ended = hil("suite", "run", models, "--flow", flow, "--board", simulator, "--out", "out", "--json")
    assert ended.code == 0, ended.err
    cases = ended.document["cases"]
    layers = [f"net_layer_{op}_{op.lower()}{number}" for number, op in enumerate(OPS)]
    assert [case["id"] for case in cases] == ["net_full_model", *layers] == ended.document["ids"]
    assert {case["outcome"] for case in cases} == {"PASS"}
    assert {case["op"] for case in cases} == {"", *OPS}
    assert all(case["device_p50_ns"] > 0 and case["timings"]["run_s"] > 0 for case in cases)
    assert {case["cached"] for case in cases} == {None if flow == "onnxruntime" else False}
    assert all((tmp_path / "out" / name).is_file() for name in REPORTS)
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == ended.document["ids"]
    assert len(ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().findall(".//testcase")) == len(cases)
    again = hil("suite", "run", models, "--flow", flow, "--board", simulator, "--out", "again", "--json")
    assert {case["cached"] for case in again.document["cases"]} == {None if flow == "onnxruntime" else True}
    assert hil("suite", "diff", "out", "again").code == 0


def test_runtime_replaces_runtime_of_flow(hil, simulator, models, tmp_path):
    run = ("suite", "run", models, "--no-layers", "--board", simulator, "--json")
    ended = hil(*run, "--runtime", "onnxruntime", "--out", "one")
    assert ended.code == 0, ended.err
    assert {(case["flow"], case["runtime"]) for case in ended.document["cases"]} == {("onnxruntime", "onnxruntime")}
    several = hil(*run, "--runtime", "onnxruntime", "--runtime", "iree", "--out", "two")
    assert several.code == 0, several.err
    runtimes = {name: json.loads((tmp_path / "two" / name / "suite.json").read_text())["runtime"] for name in RUNTIMES}
    assert runtimes == dict(zip(RUNTIMES, RUNTIMES, strict=True))
    wrong = hil(*run, "--runtime", "onxruntime")
    assert wrong.code == 2 and "onnxruntime" in wrong.err


@pytest.mark.slow
def test_compile_flags_apply_to_all_cases(hil, simulator, models):
    run = ("suite", "run", models, "--board", simulator, "--json")
    assert hil(*run, "--compile-flag=--iree-opt-level=O1", "--out", "good").code == 0
    ended = hil(*run, "--compile-flag=--no-such-flag", "--out", "bad")
    assert {case["outcome"] for case in ended.document["cases"]} == {"COMPILE_ERROR"} and ended.code == 3
    assert all("--compile-flag=--no-such-flag" in case["repeat"] for case in ended.document["cases"])


def test_project_file_sets_compile_flags_of_one_model(hil, simulator, models, tmp_path):
    chain(models / "other.onnx", ["Relu", "Exp"])
    (tmp_path / "hil.toml").write_text('[models."other.onnx"]\ncompile_flags = ["--no-such-flag"]\n')
    assert hil("board", "trust", tmp_path).code == 0
    ended = hil("suite", "run", models, "--no-layers", "--board", simulator, "--out", "out", "--json")
    outcomes = {case["id"]: case["outcome"] for case in ended.document["cases"]}
    assert outcomes == {"net_full_model": "PASS", "other_full_model": "COMPILE_ERROR"}


@pytest.mark.parametrize(("words", "runtime"), [((), "onnxruntime"), (("--flow", "iree"), "iree")])
def test_project_file_sets_runtime_unless_flow_is_given(hil, simulator, models, tmp_path, words, runtime):
    chain(models / "other.onnx", ["Relu", "Exp"])
    (tmp_path / "hil.toml").write_text('[models."other.onnx"]\nruntime = "onnxruntime"\n')
    ended = hil("suite", "run", models, "--no-layers", "--board", simulator, "--out", "out", "--json", *words)
    cases = {case["id"]: (case["runtime"], case["outcome"]) for case in ended.document["cases"]}
    assert cases == {"net_full_model": ("iree", "PASS"), "other_full_model": (runtime, "PASS")}
    repeats = {case["id"]: case["repeat"] for case in ended.document["cases"]}
    assert f"--runtime {runtime}" in repeats["other_full_model"] or runtime == "iree"


@pytest.mark.slow
def test_suite_blames_overflowing_layer_of_shared_shape(hil, tmp_path):
    tensors = [numpy_helper.from_array(np.eye(4, dtype=np.float32) * size, name) for name, size in WEIGHTS.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "small"], ["h"], "small"),
        helper.make_node("MatMul", ["h", "large"], ["y"], "large"),
    ]
    ends = [(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "y")]
    folder = tmp_path / "models"
    folder.mkdir()
    save_model(folder / "net.onnx", nodes, ends[:1], ends[1:], tensors)
    np.savez(folder / "net.inputs.npz", x=np.arange(8, dtype=np.float32).reshape(2, 4))
    run = ("suite", "run", folder, "--flow", "onnxruntime", "--runtime-hw-type", "sim-undeclared", "--json")
    ended = hil(*run, "--out", "out")
    assert ended.code == 1, ended.err
    assert {case["id"]: case["outcome"] for case in ended.document["cases"]} == {
        "net_full_model": "FAIL",
        "net_layer_MatMul_small": "PASS",
        "net_layer_MatMul_large": "FAIL",
    }
    merged = hil(*run, "--merge", "shape", "--out", "merged")
    assert [case["id"] for case in merged.document["cases"]] == ["net_full_model", "net_layer_MatMul_small"]
    listed = hil("suite", "list", folder, "--no-merge", "--json")
    assert len(listed.document["cases"]) == 3


def test_filter_without_match_exits_with_5(hil, simulator, models):
    ended = hil("suite", "run", models, "--board", simulator, "--filter", "nothing*", "--out", "out")
    assert ended.code == 5


def test_mismatch_fails_with_working_repeat_and_diff_commands(hil, simulator, models, tmp_path):
    np.savez(models / "net.expected.npz", t6=np.zeros(8, np.float32))
    ended = hil("suite", "run", models, "--flow", "onnxruntime", "--board", simulator, "--out", "out", "--json")
    assert ended.code == 1
    wrong, *others = ended.document["cases"]
    assert wrong["id"] == "net_full_model" and wrong["outcome"] == "FAIL"
    assert {case["outcome"] for case in others} == {"PASS"}
    assert "net_full_model" in hil("suite", "report", "out").out
    for command, code in ((wrong["diff"], 1), (wrong["repeat"], 1)):
        words = command.replace("--plot diff.png", "").split()
        assert words[0] == "hil"
        assert hil(*words[1:]).code == code, command


def test_expected_failures_are_strict_and_updated_from_run(hil, simulator, models, tmp_path):
    np.savez(models / "net.expected.npz", t6=np.zeros(8, np.float32))
    run = ("suite", "run", models, "--flow", "onnxruntime", "--board", simulator)
    assert hil(*run, "--out", "first").code == 1
    assert "net_full_model" in hil("suite", "expect", "first").out
    assert not (models / "expected.toml").exists()
    misspelt = hil("suite", "expect", "first", "--file", "expetced.toml")
    assert misspelt.code == 2 and "file expetced.toml not found" in misspelt.err
    assert hil("suite", "expect", "first", "--update").code == 0
    second = hil(*run, "--out", "second", "--json")
    assert second.code == 0 and second.document["cases"][0]["outcome"] == "XFAIL"
    only = hil(*run, "--only-expected-failures", "--out", "only", "--json")
    assert [case["id"] for case in only.document["cases"]] == ["net_full_model"] and only.code == 0
    (models / "net.expected.npz").unlink()
    third = hil(*run, "--out", "third", "--json")
    assert third.code == 1 and third.document["cases"][0]["outcome"] == "XPASS"
    assert hil("suite", "expect", "third", "--update").code == 0
    assert hil(*run, "--out", "fourth").code == 0


def test_unreadable_model_gives_single_import_error(hil, simulator, models):
    (models / "broken.onnx").write_bytes(b"\x08\x09 no model")
    ended = hil("suite", "run", models, "--flow", "onnxruntime", "--board", simulator, "--out", "out", "--json")
    assert ended.code == 3
    outcomes = Counter(case["outcome"] for case in ended.document["cases"])
    assert outcomes == {"IMPORT_ERROR": 1, "PASS": 7}


@pytest.mark.slow
def test_unfailable_flow_tolerance_falls_back_to_default(hil, simulator, tmp_path):
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(size=(16, 8)).astype(np.float32) * 0.2, "w")
    ends = [("x", TensorProto.FLOAT, [1, 16])], [("y", TensorProto.FLOAT, [1, 8])]
    save_model(tmp_path / "fc.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"], "fc")], *ends, [weight])
    run = ("suite", "run", "fc.onnx", "--flow", "onnxruntime-dynamic-int8", "--board", simulator)
    ended = hil(*run, "--out", "out", "--json")
    assert ended.code == 0, ended.err
    # The scales that the model computes are far smaller than the tolerance of its outputs.
    outputs = [output for case in ended.document["cases"] for output in case["outputs"] if output["tolerance"]]
    atols = {output["tolerance"]["atol"] for output in outputs}
    assert 2e-2 in atols and min(atols) <= 1e-5
    given = hil(*run, "--atol", "1", "--json")
    assert given.code == 1, "a tolerance that was typed is refused"
    assert "BLIND" in {case["outcome"] for case in given.document["cases"]}


@pytest.mark.slow
def test_boards_share_cases(hil, start_agent, models):
    boards = [start_agent("--fault", "pace:seconds=1", module="hil.sim") for _ in range(2)]
    options = [option for board in boards for option in ("--board", board)]
    ended = hil("suite", "run", models, "--flow", "onnxruntime", *options, "--out", "out", "--json")
    assert ended.code == 0, ended.err
    assert {case["board"] for case in ended.document["cases"]} == set(boards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "word"),
    slow_except(
        [
            (["corrupt"], ["corrupt"], "always wrong"),
            (["corrupt:times=1"], ["corrupt:times=1"], "flaky"),
            # The second board has a slow link, so the first board takes the case.
            (["corrupt"], ["slow:rate=1e9,delay=0.5"], "one bad board"),
        ],
        2,
    ),
)
def test_confirm_distinguishes_bad_case_from_bad_board(hil, start_agent, models, first, second, word):
    boards = [start_agent("--fault", *faults, module="hil.sim") for faults in (first, second)]
    options = [option for board in boards for option in ("--board", board)]
    run = ("suite", "run", models, "--flow", "onnxruntime", "--filter", "=net_full_model", "--confirm", 2)
    ended = hil(*run, *options, "--out", "out", "--json")
    (case,) = ended.document["cases"]
    assert (case["outcome"], case["confirmed"], ended.code) == ("FAIL", word, 1)
    assert [one["why"] for one in case["attempts"]] == ["confirm", "confirm"]
    # The first board again, then the second.
    assert [one["board"] for one in case["attempts"]] == [case["board"], *(set(boards) - {case["board"]})]
    assert word in hil("suite", "report", "out").out


@pytest.mark.slow
def test_suite_replaces_and_reports_dead_board(hil, start_agent, models):
    dying = start_agent("--fault", "kill-agent", module="hil.sim")
    sound = start_agent("--fault", "pace:seconds=1", module="hil.sim")  # so that the second board also gets a case
    run = ("suite", "run", models, "--flow", "onnxruntime", "--board", dying, "--board", sound)
    ended = hil(*run, "--out", "out", "--json")
    assert ended.code == 0, ended.err
    cases = ended.document["cases"]
    assert {case["outcome"] for case in cases} == {"PASS"} and {case["board"] for case in cases} == {sound}
    assert [one["board"] for case in cases for one in case["attempts"] if one["why"] == "board lost"] == [dying]
    assert f"{dying} removed from the run: " in ended.err


def test_suite_without_live_board_loses_every_case(hil, start_agent, models):
    dying = start_agent("--fault", "kill-agent", module="hil.sim")
    ended = hil("suite", "run", models, "--flow", "onnxruntime", "--board", dying, "--out", "out", "--json")
    assert ended.code == 4
    outcomes = [case["outcome"] for case in ended.document["cases"]]
    # The board is unreachable: later cases never reach a board.
    assert len(outcomes) == 7 and {"BOARD_LOST"} <= set(outcomes) <= {"BOARD_LOST", "BOARD_UNREACHABLE"}


def start(arguments: list, environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def some_have_ended(folder: Path, least: int = 2):
    path = folder / "results.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= least


SLOWLY = ("--fault", "slow:rate=1e9,delay=0.03")


def test_killed_run_resumes_without_duplicate_cases(hil, environment, models, tmp_path):
    for number in range(5):
        shutil.copy(models / "net.onnx", models / f"net{number}.onnx")
    out = tmp_path / "out"
    run = ["suite", "run", models, "--flow", "onnxruntime", *SLOWLY, "--out", out]
    process = start(run, environment, tmp_path)
    eventually(some_have_ended(out), process=process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = records(out)
    assert 2 <= len(before) < 42
    ended = hil("suite", "run", "--resume", out, "--json")
    assert ended.code == 0, ended.err
    counts = Counter(record["id"] for record in records(out))
    assert set(counts.values()) == {1} and len(counts) == 42
    assert [case["id"] for case in ended.document["cases"]] == ended.document["ids"]
    # Finished cases did not run again.
    started = {record["id"]: record["started"] for record in records(out)}
    assert all(started[record["id"]] == record["started"] for record in before)
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert Counter(row["id"] for row in rows) == counts


def test_ctrl_c_saves_reports_and_prints_resume_command(hil, environment, models, tmp_path):
    out = tmp_path / "out"
    slowly = ("--fault", "slow:rate=1e9,delay=0.1")
    process = start(["suite", "run", models, "--flow", "onnxruntime", *slowly, "--out", out], environment, tmp_path)
    eventually(some_have_ended(out, 1), process=process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and f"--resume {out}".encode() in said and b"Traceback" not in said
    assert all((out / name).is_file() for name in REPORTS)
    assert json.loads((out / "suite.json").read_text())["interrupted"]
    assert hil("suite", "run", "--resume", out).code == 0
    assert len(records(out)) == 7


@pytest.mark.slow
def test_resume_rejects_run_with_missing_models(hil, simulator, models):
    run = ("suite", "run", models, "--flow", "onnxruntime", "--board", simulator, "--out", "out")
    assert hil(*run).code == 0
    (models / "net.onnx").rename(models / "other.onnx")
    ended = hil("suite", "run", "--resume", "out")
    assert ended.code == 2 and "no longer has the case 'net_full_model'" in ended.err
    assert hil(*run).code == 2  # the directory is in use


@pytest.mark.slow
def test_resume_reruns_cases_with_changed_inputs(hil, simulator, models, tmp_path):
    shutil.copy(models / "net.onnx", models / "other.onnx")
    flow = '[mine]\ndescription = "d"\nruntime = "onnxruntime"\n'
    (tmp_path / "mine.toml").write_text(flow)
    run = ("suite", "run", models, "--flow", "mine.toml", "--no-layers", "--board", simulator, "--out", "out", "--json")
    first = {case["id"]: case for case in hil(*run).document["cases"]}

    def again() -> tuple[list[str], str]:
        ended = hil("suite", "run", "--resume", "out", "--json")
        assert ended.code == 0, ended.err
        now = {record["id"]: record["started"] for record in records(tmp_path / "out")}
        assert len(records(tmp_path / "out")) == len(now) == 2, "each case is in it once"
        found = [name for name, started in now.items() if started != first[name]["started"]]
        first.update((case["id"], case) for case in ended.document["cases"])
        return found, ended.err

    assert again() == ([], "")
    head = tmp_path / "out" / "suite.json"
    head.write_text(head.read_text().replace(f'"onnxruntime": "{version("onnxruntime")}"', '"onnxruntime": "1.0.0"'))
    found, said = again()
    assert found == [] and "finished cases ran with onnxruntime 1.0.0 (here: " in said
    chain(models / "net.onnx", OPS[::-1])
    found, said = again()
    assert found == ["net_full_model"] and "net_full_model will run again: the model" in said
    np.savez(models / "other.inputs.npz", t0=np.ones(8, np.float32))
    assert again()[0] == ["other_full_model"]
    (tmp_path / "mine.toml").write_text(flow + "rtol = 1e-3\n")
    found, said = again()
    assert sorted(found) == ["net_full_model", "other_full_model"] and "and 1 more will run again" in said


@pytest.mark.slow
def test_stored_command_resumes_run_with_all_options(hil, models, tmp_path):
    shutil.move(models, tmp_path / "my models")
    out = tmp_path / "an out"
    asked = ("--filter", "net_layer_*", "--fault", "slow:rate=1e9,delay=0.001", "--rtol", 1e-3, "--debug-ir", "an ir")
    assert hil("suite", "run", "my models", "--flow", "onnxruntime", *asked, "--out", out).code == 0
    lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    lost = json.loads(lines[-1])["id"]
    stale = out / "cases" / lost / "outputs" / "0-stale.npy"
    stale.parent.mkdir()
    stale.touch()
    head = json.loads((out / "suite.json").read_text())
    words = shlex.split(head["command"])
    assert words[:4] == ["hil", "suite", "run", "--resume"]
    ended = hil(*words[1:], "--json")
    assert ended.code == 0, ended.err
    assert ended.document["request"] == head["request"]
    assert ended.document["board_info"].keys() == head["board_info"].keys() == {"sim"}
    assert [case["id"] for case in ended.document["cases"]] == head["ids"] and len(records(out)) == 6
    assert not stale.exists(), "what the killed try left behind is not the case's"
    # A second resume has no work and preserves the board information.
    assert hil(*words[1:], "--json").document["board_info"] == ended.document["board_info"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({}, "cannot resume out: missing or invalid request in suite.json"),
        ({"sauce": "models"}, "cannot resume out: missing or invalid request in suite.json"),
        (3, "cannot read out/suite.json: invalid record: Expected `object`, got `int` - at `$.request`"),
    ],
)
def test_resume_rejects_invalid_suite_record(hil, tmp_path, monkeypatch, request_, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "suite.json").write_text(json.dumps(suite_head().to_json() | {"request": request_}))
    # A record of the same user, written by a different hil version.
    monkeypatch.setenv("HOME", str(tmp_path))
    begun.seal(tmp_path / "out", request_)
    ended = hil("suite", "run", "--resume", "out")
    assert ended.code == 2 and text in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere"),
        (["models"], "did you mean '@models'"),
        (["@models", "--flow", "irree"], "did you mean"),
        (["@models", "--board", "sim", "--board", "sim"], "duplicate --board sim"),
        (["@models", "--rtol", "-1"], "tolerance"),
        ([], "a suite or --resume is required"),
        (["@models", "--resume", "x"], "a suite or --resume is required"),
        (["--resume", "nowhere"], "nowhere is not a suite run"),
    ],
)
def test_invalid_arguments_exit_with_2(hil, arguments, words):
    ended = hil("suite", "run", *arguments)
    assert ended.code == 2 and words in ended.err

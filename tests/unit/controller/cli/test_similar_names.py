"""For every kind of name on the command line, the error for a wrong name suggests a similar known name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.histories import history_entry
from support.models import DIGITS
from support.run_records import run_case, run_record
from support.suite_runs import case as suite_case
from support.suite_runs import suite_run

from hil.controller.cli import main
from hil.controller.records.run import RunRecord
from hil.controller.storage.history.store import HistoryStore

MODEL = "digits_cnn.onnx"
RUN = "20261130-120000-digits_cnn-86d5"
TOML = {
    "defaults.toml": "[defaults]\nsede = 3\n",
    "table.toml": "[defualts]\nseed = 3\n",
    "model.toml": '[models."*"]\nsede = 3\n',
    "history.toml": "[history]\nqouta = '1 GiB'\n",
}
# Kind of name, words of the command, and the suggestion.
COMMANDS: Sequence[tuple[str, str, str]] = (
    ("verb", "rum", "run"),
    ("subcommand", "board chek", "check"),
    ("subcommand", "help farm tokn", "token"),
    ("option", f"run {MODEL} --bord sim", "--board"),
    ("choice", f"suite run {MODEL} --layer-inputs rael", "real"),
    ("choice", "completion bsh", "bash"),
    ("board", f"run {MODEL} --board sim-f61", "sim-f16"),
    ("board", "board check sim-f61", "sim-f16"),
    ("board", "board show sim-f61", "sim-f16"),
    ("board", "board remove bnech", "bench"),
    ("board", "board rename bnech other", "bench"),
    ("board type", f"run {MODEL} --runtime-hw-type sim-f61", "sim-f16"),
    ("board config", f"run {MODEL} --board bord.toml", "board.toml"),
    ("runtime", f"run {MODEL} --runtime onnxruntim", "onnxruntime"),
    ("arithmetic", f"run {MODEL} --arithmetic bfloat61", "bfloat16"),
    ("reference", f"run {MODEL} --reference onnxruntme", "onnxruntime"),
    ("criterion", f"run {MODEL} --accept sqrn>=60", "sqnr"),
    ("flow", f"suite run {MODEL} --flow iree-fp16", "iree-f16"),
    ("flow file", f"suite run {MODEL} --flow flow.toml", "flows.toml"),
    ("fault", f"run {MODEL} --fault crsh", "crash"),
    ("key of a fault", f"run {MODEL} --fault crash:signl=SIGILL", "signal"),
    ("model", "run digits_cn.onnx", MODEL),
    ("model", "config show digits_cn.onnx", MODEL),
    ("model", "compile digits_cn.onnx", MODEL),
    ("example", "run example:digits_cn", "example:digits_cnn"),
    ("suite", "suite list @operator", "@operators"),
    ("suite", "suite list digits_cn.onnx", MODEL),
    ("case", f"suite list {MODEL} --filter digits_cnn_ful_model", "digits_cnn_full_model"),
    ("suite run", "suite diff hil-suites/mondy hil-suites/monday", "hil-suites/monday"),
    ("run", f"runs show {RUN}x", RUN),
    ("run", f"runs rm {RUN}x --yes", RUN),
    ("run", f"compare {RUN}x {RUN}", RUN),
    ("run", f"profile show {RUN}x", RUN),
    ("label", "runs list --label nightl", "nightly"),
    ("dimension", "run digits_cnn_batch.onnx --dim NN=2 --board sim", "N"),
    ("input", f"run {MODEL} --input imge=x.npy --board sim", "image"),
    ("array", f"run {MODEL} --input x.npz:imge --board sim", "image"),
    ("tensor file", "compare x.npy y.npy", "x.npy"),
    ("dataset", f"eval {MODEL} --dataset x.npzz --metric top1", "x.npz"),
    ("layer", f"layers {MODEL} --from con1", "conv1"),
    ("bundle", "bundle inspect bundl.hilb", "bundle.hilb"),
    ("series", "history show digits_cn", "digits_cnn"),
    ("plugin", "plugin check numpyy", "numpy"),
    ("axis", "gate --over comit", "commit"),
    ("key of hil.toml", "@defaults.toml config show", "seed"),
    ("table of hil.toml", "@table.toml config show", "defaults"),
    ("key of hil.toml", "@model.toml config show", "seed"),
    ("key of hil.toml", "@history.toml config show", "quota"),
    ("key of a board config", "config show --board key.toml", "arithmetic"),
    ("table of a board config", "config show --board table-of-board.toml", "simulator"),
    ("key of a flow", f"suite run {MODEL} --flow key-of-flow.toml", "runtime"),
    ("trusted directory", "board trust board_config", "board_configs"),
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with models, boards, flows, and stored runs, suites and measurements."""
    folder = tmp_path_factory.mktemp("work")
    for name in (MODEL, "digits_cnn_batch.onnx"):
        shutil.copy(DIGITS / name, folder)
    np.savez(folder / "x.npz", image=np.zeros((1, 1, 28, 28), np.float32))
    np.save(folder / "x.npy", np.zeros(3, np.float32))
    for name, text in TOML.items():
        (folder / name).write_text(text)
    (folder / "bundle.hilb").touch()
    (folder / "flows.toml").write_text('[fast]\nruntime = "iree"\n')
    (folder / "key-of-flow.toml").write_text('[fast]\nruntme = "iree"\n')
    (folder / "board.toml").write_text("[simulator]\n")
    (folder / "key.toml").write_text('[board]\narithmetc = "float16"\n')
    (folder / "table-of-board.toml").write_text("[simulater]\n")
    (folder / "board_configs").mkdir()
    (folder / "home/hil/boards").mkdir(parents=True)
    (folder / "home/hil/boards/bench.toml").write_text('[connection]\naddress = "pi@bench"\n')
    store_record(folder / "hil-runs" / RUN / "run.json", run_record(run_case(), id=RUN, labels=["nightly"]))
    suite_run(folder / "hil-suites/monday", [suite_case("digits_cnn_full_model")])
    with HistoryStore.open(folder / "hil-runs/history", create=True) as store:
        store.add([history_entry(case="digits_cnn")])
    return folder


def store_record(path: Path, record: RunRecord) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": 1, **record.to_json()}))


@pytest.fixture
def call(work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs a command and returns its messages."""
    for name in ("HIL_BOARD", "HIL_FARM", "HIL_FARM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(work / "home"))
    monkeypatch.chdir(work)

    def run(words: str) -> str:
        first, _, rest = words.partition(" ")
        if first.startswith("@"):
            Path("project").mkdir(exist_ok=True)
            shutil.copy(first[1:], "project/hil.toml")
            monkeypatch.chdir(work / "project")
            words = rest
        monkeypatch.setattr(sys, "argv", ["hil", *words.split()])
        code = main.call()
        err = capfd.readouterr().err
        assert code in (0, 2, 3, 5) and "Traceback" not in err, err
        return err

    return run


@pytest.mark.parametrize(("kind", "words", "known"), COMMANDS, ids=[f"{kind}: {words}" for kind, words, _ in COMMANDS])
def test_error_suggests_similar_name(kind: str, words: str, known: str, call: Callable[[str], str]) -> None:
    err = call(words)
    assert "did you mean " in err, err
    suggestion = err.partition("did you mean ")[2].partition("?")[0]
    assert f"'{known}'" in suggestion, err

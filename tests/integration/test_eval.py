"""`hil eval` from the command line, on the simulator."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.commands import Ended
from support.fake_farm import start_hil
from support.models import DIGITS
from support.schemas import check_document
from support.waiting import eventually

DATASET = DIGITS / "digits_test.npz"
RUNTIME = ("--runtime", "onnxruntime", "--reference", "onnxruntime")
TOP1 = (DIGITS / "digits_cnn.onnx", "--dataset", DATASET, "--metric", "top1", *RUNTIME)
SLOW_METRIC = """
import time
import numpy as np

def score(outputs, label):
    time.sleep(0.02)
    return float(np.argmax(outputs["logits"]) == label)
"""


@pytest.mark.daily
def test_eval_scores_digits_and_stores_record(hil: Callable[..., Ended], tmp_path: Path) -> None:
    ended = hil("eval", *TOP1, "--json")
    assert ended.code == 0, ended.err
    document = ended.document
    check_document(document, "eval")
    # The example's README states this accuracy.
    assert document["scores"]["board"] == document["scores"]["reference"] == 62 / 64
    assert (document["evaluated"], document["outcome"], document["board"]) == (64, "SKIP", "sim")
    shown = hil("runs", "show", "latest")
    assert "96.88 %" in shown.out and "64 of 64" in shown.out
    assert document["id"] in hil("runs", "list").out
    refused = hil("run", "--resume", document["id"])
    assert refused.code == 2 and "hil eval --resume" in refused.err


def test_eval_stops_early_on_faulty_board(hil: Callable[..., Ended]) -> None:
    ended = hil("eval", *TOP1, "--max-drop", 5, "--fault", "corrupt:elements=10", "--json")
    document = ended.document
    assert (ended.code, document["outcome"], document["stopped_early"]) == (1, "FAIL", True)
    assert document["evaluated"] < 64 and document["scores"]["worst"]


def test_killed_eval_resumes_without_losing_samples(
    hil: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_METRIC)
    words = (DIGITS / "digits_cnn.onnx", "--dataset", DATASET, "--metric", "slow.py", *RUNTIME)
    killed = start_hil(environment, tmp_path, "eval", *words)

    def read_lines() -> list[str]:
        return [line for path in tmp_path.glob("hil-runs/*/samples.jsonl") for line in path.read_text().splitlines()]

    eventually(lambda: len(read_lines()) >= 5, process=killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = read_lines()
    assert 5 <= len(before) < 64
    assert "UNFINISHED" in hil("runs", "show", "latest").out
    ended = hil("eval", "--resume", "latest", "--json")
    assert ended.code == 0, ended.err
    assert (ended.document["evaluated"], ended.document["scores"]["board"]) == (64, 62 / 64)
    assert read_lines()[: len(before)] == before and len(read_lines()) == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metric", "top2"), "unknown metric 'top2'"),
        (("--dataset", "none"), "no such dataset: none"),
        (("--dataset", "wrong.npz"), "expected 1x1x8x8 float32"),
        (("--max-drop", "101"), "invalid --max-drop 101"),
        (("--output", "probabilities"), "unknown output 'probabilities'"),
        (("--dim", "N=1..4"), "is a range"),
    ],
)
def test_eval_rejects_invalid_input(
    options: tuple[str, ...], message: str, hil: Callable[..., Ended], tmp_path: Path
) -> None:
    np.savez(tmp_path / "wrong.npz", image=np.zeros((2, 1, 8, 9), np.float32), label=[1, 2])
    given = {"--dataset": str(DATASET), "--metric": "top1", **dict([options])}
    ended = hil("eval", DIGITS / "digits_cnn.onnx", *RUNTIME, *(one for pair in given.items() for one in pair))
    assert ended.code == 2 and message in ended.err
    assert not list(tmp_path.glob("hil-runs/*/samples.jsonl"))


def test_eval_requires_dataset_and_metric(hil: Callable[..., Ended]) -> None:
    ended = hil("eval", DIGITS / "digits_cnn.onnx")
    assert ended.code == 2 and "missing --dataset, --metric" in ended.err

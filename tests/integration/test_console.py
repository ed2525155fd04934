"""The console of a simulated board in runs and suites, and as a track of a trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ended

from hil.controller.analysis.profile.store import TRACE

ORT = ("--runtime", "onnxruntime")
SCRIPT = """
echo "Booting Linux"
echo "watchdog: watchdog0: watchdog did not stop!"
exec cat
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """Config of a simulated board with a console."""
    (tmp_path / "console.sh").write_text(SCRIPT)
    path = tmp_path / "laptop.toml"
    path.write_text(f'[simulator]\n[console]\ncommand = ["sh", "{tmp_path}/console.sh"]\n')
    return path


def test_crash_quotes_console_and_run_stores_lines(hil: Callable[..., Ended], board: Path, doubling: Path):
    ended = hil("run", doubling, "--board", board, *ORT, "--fault", "crash", "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "RUN_CRASH")
    assert 'console: "watchdog: watchdog0: watchdog did not stop!"' in ended.case["reason"]
    (quote,) = ended.case["error"]["console"]
    assert (quote["pattern"], quote["board_ns"] > 0) == ("watchdog", True)
    (stored,) = ended.document["consoles"]
    assert (stored["board"], stored["lines"], stored["omitted"], len(stored["quotes"])) == ("laptop", 2, 0, 1)
    lines = (board.parent / ended.document["folder"] / stored["file"]).read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["Booting Linux", quote["text"]]


def test_profile_has_track_with_console_lines(hil: Callable[..., Ended], board: Path, doubling: Path, tmp_path: Path):
    ended = hil("run", doubling, "--board", board, *ORT, "--profile", "prof")
    assert ended.code == 0, ended.err
    profile = json.loads((tmp_path / "prof" / "profile.json").read_text())
    texts = ["Booting Linux", "watchdog: watchdog0: watchdog did not stop!"]
    assert [span["name"] for span in profile["console"]] == texts
    trace = gzip.decompress((tmp_path / "prof" / TRACE).read_bytes())
    assert b"console: laptop" in trace and texts[1].encode() in trace


@pytest.mark.slow
def test_suite_stores_lines_of_its_board(hil: Callable[..., Ended], board: Path, doubling: Path, tmp_path: Path):
    models = tmp_path / "models"
    models.mkdir()
    doubling.rename(models / doubling.name)
    ended = hil("suite", "run", models, "--board", board, *ORT, "--fault", "crash")
    assert ended.code == 3, ended.err
    (head,) = tmp_path.rglob("suite.json")
    (stored,) = json.loads(head.read_text())["consoles"]
    assert (head.parent / stored["file"]).read_text().count("\n") == 2
    case, *_ = map(json.loads, (head.parent / "results.jsonl").read_text().splitlines())
    assert [quote["pattern"] for quote in case["console"]] == ["watchdog"]


def test_failed_provision_is_board_failure(hil: Callable[..., Ended], board: Path, tmp_path: Path):
    with board.open("a") as file:
        file.write('[provision]\ncommand = ["sh", "-c", "echo no card; exit 3", "{image}"]\n')
    (tmp_path / "card.img").write_bytes(b"image")
    ended = hil("board", "provision", board, "--image", "card.img", "--json")
    error = ended.document["error"]
    assert (ended.code, error["kind"], error["outcome"]) == (4, "ProvisionFailed", "BOARD_UNFIT")
    assert error["message"] == "the provision command failed with exit code 3"
    assert error["detail"].strip() == "no card"


def test_board_without_console_or_provision_is_usage_error(hil: Callable[..., Ended], tmp_path: Path):
    (tmp_path / "card.img").write_bytes(b"image")
    ended = hil("board", "console", "sim")
    assert (ended.code, "sim has no console" in ended.err) == (2, True)
    ended = hil("board", "provision", "sim", "--image", "card.img")
    assert (ended.code, "[provision] command" in ended.err) == (2, True)

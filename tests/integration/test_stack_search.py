"""Find the driver that changes an answer on simulated boards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ended

DRIVERS = {"a": "1.0", "b": "1.0", "c": "2.0"}
ORT = ("--runtime", "onnxruntime")


@pytest.fixture
def boards(tmp_path: Path) -> list[str]:
    """Return the options for three boards. Driver 2.0 gives wrong outputs."""
    options: list[str] = []
    for name, driver in DRIVERS.items():
        text = f'[board]\nhw_type = "sim"\n[stack]\ndriver = "{driver}"\n'
        text += '[simulator]\nfaults = ["corrupt:stack=driver@2.0"]\n'
        (tmp_path / f"{name}.toml").write_text(text)
        options += ["--board", f"{name}.toml"]
    return options


def test_wrong_driver_on_one_of_three_boards_is_named(
    hil: Callable[..., Ended], boards: list[str], doubling: Path, tmp_path: Path
):
    search = ("bisect", doubling, "--over", "driver", "--runs", "2", *boards, *ORT, "--out", "found")
    ended = hil(*search, "--json")
    document = ended.document
    assert (ended.code, document["conclusion"], document["found"]) == (1, "found", ["2.0"]), ended.err
    assert document["verdict"] == "driver 2.0 changes the answer: wrong on c, correct with 1.0 on a, b"
    assert [(one["name"], one["answer"], len(one["runs"])) for one in document["boards"]] == [
        ("a", "pass", 2),
        ("b", "pass", 2),
        ("c", "fail", 2),
    ]
    assert "already contains a search" in hil(*search).err
    # A resumed search runs only the boards without an answer.
    path = tmp_path / "found" / "stack-search.json"
    stored = json.loads(path.read_text())
    stored["boards"][0]["reason"], stored["boards"][2]["answer"] = "kept", "board error"
    path.write_text(json.dumps(stored))
    again = hil(*search, "--resume", "--json")
    assert [(one["answer"], one["reason"]) for one in again.document["boards"][:2]] == [("pass", "kept"), ("pass", "")]
    assert (again.document["found"], again.document["finished"]) == (["2.0"], True)
    other = hil(*search, "--resume", "--seed", "3")
    assert (other.code, "different settings" in other.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--over", "driver", "--board", "a.toml"], "--over requires at least two boards"),
        (["--board", "a.toml", "--board", "b.toml"], "several values of --board require --over"),
        (["--over", "driver", "--plot", "x.png"], "--over and --plot are mutually exclusive"),
        (["--resume"], "--resume requires --over"),
    ],
)
def test_invalid_search_is_usage_error(
    hil: Callable[..., Ended], boards: list[str], doubling: Path, options: list[str], message: str
):
    ended = hil("bisect", doubling, *options)
    assert (ended.code, message in ended.err) == (2, True), ended.err

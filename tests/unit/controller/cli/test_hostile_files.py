"""Test commands with hostile files and names: they fail at once with a message and without a traceback."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from support.run_records import run_case, run_record

from hil.controller.cli.main import cli
from hil.errors import HilError

LONG = "x" * 300
TENSOR = {"name": "y", "dtype": "float32", "shape": [1]}


def refuse(words: Sequence[object]) -> str:
    """Run a command that must fail, and return its message."""
    with pytest.raises((HilError, click.ClickException)) as caught:
        cli.main([str(word) for word in words], prog_name="hil", standalone_mode=False)
    return str(caught.value)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_odd(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "sparse file"])
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("r/run.json", ("runs", "show", "r")),
        ("r/run.json", ("compare", "./r", "./r")),
        ("a.npy", ("compare", "a.npy", "a.npy")),
        ("trace.json", ("trace", "show", ".")),
        ("profile.json", ("profile", "show", ".")),
        ("suite.json", ("suite", "report", ".")),
        ("golden.json", ("bundle", "import", ".", "--from", "golden", "-o", "o.hilb")),
        ("b.toml", ("board", "show", "./b.toml")),
        ("board_configs/b.toml", ("board", "trust", ".")),
        ("a.hilb", ("bundle", "show", "a.hilb")),
        ("a.bpte", ("bundle", "import", "a.bpte", "--from", "bpte", "-o", "o.hilb")),
        ("m.onnx", ("compile", "m.onnx")),
    ],
)
def test_commands_reject_special_files(folder, kind, file, words):
    make_odd(folder / file, kind)
    assert refuse(words)


@pytest.mark.parametrize(
    "words",
    [
        *[(verb, LONG) for verb in ("run", "compile", "layers", "publish")],
        *[("runs", "show", LONG), ("trace", "show", LONG), ("profile", "show", LONG), ("suite", "list", LONG)],
        *[("board", "show", LONG), ("board", "trust", LONG), ("bundle", "import", LONG, "--from", "golden")],
        ("compile", "m.onnx", "-o", LONG),
    ],
    ids=" ".join,
)
def test_commands_reject_oversized_names(folder, words):
    (folder / "m.onnx").touch()
    assert refuse(words)


@pytest.mark.parametrize("name", ["a\0b", LONG, "\ud800", "../" * 50 + "etc/passwd", "", 5, None, ["a"], {"a": 1}])
def test_compare_rejects_record_with_invalid_file_name(folder, name):
    (folder / "r").mkdir()
    record = run_record(run_case()).to_json()
    (case,) = record["cases"]
    case["outputs"] = [{**TENSOR, "file": name}]
    (folder / "r" / "run.json").write_text(json.dumps(record))
    assert refuse(("compare", "./r", "./r"))
    del case["timings"]
    (folder / "r" / "run.json").write_text(json.dumps(record))
    assert "is not a run record" in refuse(("runs", "show", "./r"))


@pytest.mark.parametrize("name", ["a\0b", LONG])
def test_bundle_import_rejects_flag_file_with_invalid_module(folder, name):
    (folder / "m.flagfile").write_text(f"--module={name}\n--function=f\n--input=1xf32=1\n--expected_output=1xf32=1\n")
    assert refuse(("bundle", "import", ".", "--from", "flagfile", "-o", "o.hilb"))
    cli.main(["suite", "list", "."], prog_name="hil", standalone_mode=False)

"""`hil config show`: effective values and their sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from support.schemas import check_document

from hil.controller.cli.main import cli
from hil.core.variables import VARIABLES
from hil.errors import UsageError

PROJECT = """
[defaults]
board = "kitchen"
seed = 3
dims = ["N=1", "M=2"]
compile_flags = ["--x"]
[models."*.onnx"]
dims = ["N=4"]
input_range = "-1:1"
[models."net.onnx"]
seed = 5
accept = ["argmax"]
[models."net.onnx".outputs."y"]
accept = ["kl<=1"]
[history]
quota = "500 MiB"
"""
KITCHEN = """
[board]
hw_type = "rpi5"
runtime = "onnxruntime"
arithmetic = "float16"
[connection]
address = "root@rpi5"
[devices]
onnxruntime = "CPUExecutionProvider"
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project with a board, and use it as the working directory."""
    folder = tmp_path / "project"
    (folder / "board_configs").mkdir(parents=True)
    (folder / "models").mkdir()
    for name in ("models/net.onnx", "other.mlir", "a.tflite"):
        (folder / name).touch()
    (folder / "hil.toml").write_text(PROJECT)
    (folder / "board_configs/kitchen.toml").write_text(KITCHEN)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("HIL_BOARD", "HIL_BOARDS", "HIL_LABELS", "HIL_SANDBOX", "HIL_SIMULATOR", "HIL_FARM_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return folder


def show(*words: str) -> dict[str, tuple[Any, str, str]]:
    """Return key -> value, source and place."""
    done = CliRunner().invoke(cli, ["config", "show", *words, "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    check_document(document, "config show")
    rows = document["values"]
    keys = [(row["table"], row["key"]) for row in rows]
    assert len(keys) == len(set(keys))
    # Keys of a board's config have the table as a prefix, because options have the same names.
    return {
        (row["key"] if row["table"] != "board" else f"board.{row['key']}"): (row["value"], row["source"], row["where"])
        for row in rows
    }


def test_config_show_lists_sources_of_defaults(project: Path, tmp_path: Path) -> None:
    found = show()
    config = str((project / "board_configs/kitchen.toml").resolve())
    assert found["board"] == ("kitchen", "project", "[defaults]")
    assert found["seed"] == (3, "project", "[defaults]")
    assert found["dims"] == (["N=1", "M=2"], "project", "[defaults]")
    assert found["timeout"] == (60.0, "built-in", "")
    assert found["runtime"] == ("onnxruntime", "board config", config)
    assert found["arithmetic"] == ("float16", "board config", config)
    assert found["board.address"] == ("root@rpi5", "board config", config)
    assert found["board.device"] == ("CPUExecutionProvider", "board config", config)
    assert (found["quota"], found["auto"]) == (("500 MiB", "project", "[history]"), (False, "built-in", ""))
    assert found["cache"] == (str(tmp_path / "cache"), "environment", "HIL_CACHE_DIR")
    assert found["out"] == ("hil-runs", "built-in", "")


def test_config_show_applies_tables_of_model() -> None:
    found = show("models/net.onnx")
    assert found["seed"] == (5, "project", '[models."net.onnx"]')
    assert found["dims"] == (["N=4", "M=2"], "project", '[models."*.onnx"]')
    assert found["input_range"] == ("-1:1", "project", '[models."*.onnx"]')
    assert found["accept"] == (["argmax", "y: kl<=1"], "project", '[models."net.onnx"]')
    assert show("other.mlir")["seed"] == (3, "project", "[defaults]")
    assert show("a.tflite")["runtime"] == ("tflite", "built-in", "models of the format tflite")


def test_config_show_follows_precedence_of_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_BOARD", "sim-f16")
    assert show()["board"] == ("sim-f16", "environment", "HIL_BOARD")
    found = show("--board", "root@rpi4")
    assert found["board"] == ("root@rpi4", "command line", "--board")
    assert found["board.name"][0] == "generic"
    found = show("--runtime-hw-type", "sim-bf16")
    assert (found["board"][0], found["arithmetic"][0]) == (None, "bfloat16")


def test_config_show_accepts_host_of_ssh_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host lab\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    values = show("--board", "lab")
    assert values["board"] == ("lab", "command line", "--board")
    assert values["board.hw_type"][0] == "generic"


def test_config_show_reads_variables_and_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIL_LABELS": "a, b", "HIL_SANDBOX": "off", "HIL_FARM_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    found = show()
    assert found["labels"] == (["a", "b"], "environment", "HIL_LABELS")
    assert found["HIL_SANDBOX"] == ("off", "environment", "HIL_SANDBOX")
    assert found["HIL_FARM_TOKEN"] == ("(set)", "environment", "HIL_FARM_TOKEN")
    assert found["HIL_SIMULATOR"] == ("reuse", "built-in", "")


def test_config_show_hides_logins_in_urls(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "hil.toml").write_text('[defaults]\nweb_url = "https://me:secret@web/hil"\n')
    monkeypatch.setenv("HIL_FARM", "https://secret@farm:1")
    found = show()
    assert (found["web_url"][0], found["HIL_FARM"][0]) == ("https://***@web/hil", "https://***@farm:1")


def test_config_show_marks_untrusted_values(project: Path) -> None:
    def list_untrusted() -> list[str]:
        lines = CliRunner().invoke(cli, ["config", "show"], catch_exceptions=False).stdout.splitlines()
        assert lines[:2] == [
            f"project file: {project}/hil.toml",
            "tables of models: *.onnx, net.onnx (hil config show MODEL)",
        ]
        return [line.split()[0] for line in lines if line.endswith("(not trusted: hil board trust DIR)")]

    assert list_untrusted() == ["board", "compile_flags"]
    CliRunner().invoke(cli, ["board", "trust", str(project)], catch_exceptions=False)
    assert list_untrusted() == []


def test_config_show_works_without_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    found = show()
    assert (found["board"], found["runtime_hw_type"]) == ((None, "built-in", ""), ("sim", "built-in", ""))
    assert {source for _, source, _ in found.values()} == {"built-in", "board config", "environment"}
    assert "none (hil init creates one)" in CliRunner().invoke(cli, ["config", "show"]).stdout


def test_config_show_rejects_missing_model() -> None:
    error = CliRunner().invoke(cli, ["config", "show", "nope.onnx"]).exception
    assert isinstance(error, UsageError) and error.message == "model nope.onnx not found"


def test_config_show_reports_unknown_board() -> None:
    error = CliRunner().invoke(cli, ["config", "show", "--board", "kichen"]).exception
    assert isinstance(error, UsageError) and "did you mean 'kitchen'" in error.hint


def test_config_show_names_source_of_unknown_board(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_error() -> str:
        error = CliRunner().invoke(cli, ["config", "show"]).exception
        assert isinstance(error, UsageError)
        return error.message

    (project / "hil.toml").write_text('[defaults]\nboard = "kichen"\n')
    assert read_error() == f"unknown board 'kichen'; selected by {project}/hil.toml"
    monkeypatch.setenv("HIL_BOARD", "kichen")
    assert read_error() == "unknown board 'kichen'; set by the variable HIL_BOARD"


def test_describe_prints_meaning_of_every_key() -> None:
    done = CliRunner().invoke(cli, ["config", "show", "--describe"])
    lines = done.stdout.splitlines()
    keys = [place for place, line in enumerate(lines) if re.match(r"  \S", line)]
    assert len(keys) > 40
    assert [lines[place] for place in keys if not lines[place + 1].startswith("      ")] == []
    assert "](" not in done.stdout  # links of the documentation


def test_json_has_meaning_of_every_key() -> None:
    document = json.loads(CliRunner().invoke(cli, ["config", "show", "--json"]).stdout)
    assert [one["key"] for one in document["values"] if not one["meaning"]] == []


@pytest.mark.parametrize("kind", ["project", "board", "farm"])
def test_schema_prints_json_schema(kind: str) -> None:
    done = CliRunner().invoke(cli, ["config", "schema", "--file", kind])
    jsonschema.Draft202012Validator.check_schema(json.loads(done.stdout))


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in VARIABLES:
        if one.is_secret:
            monkeypatch.setenv(one.name, "s3cret")
    done = CliRunner().invoke(cli, ["config", "show"])
    assert "s3cret" not in done.stdout and "HIL_FARM_TOKEN" in done.stdout


def test_config_show_includes_settings_of_simulator(project: Path) -> None:
    (project / "small.toml").write_text(
        '[board]\nhw_type = "sim"\n[simulator]\nmemory_limit = 1000\narithmetic = "float16"\nfaults = ["corrupt"]\n'
    )
    values = show("--board", "small.toml")
    found = {key.removeprefix("board.simulator."): value[0] for key, value in values.items() if ".simulator." in key}
    assert found == {"arithmetic": "float16", "memory_limit": 1000, "faults": ["corrupt"]}
    assert "board.simulator.arithmetic" not in show("--board", "kitchen")

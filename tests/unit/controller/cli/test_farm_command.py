"""Test `hil farm submit -- CMD...`, with a fake connection."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fake_farm_client import parsed
from support.schemas import check_document

from hil.controller.cli.farm.farm import farm
from hil.controller.farm.client.submitting import SubmitReceipt, Workload
from hil.controller.farm.messages import Kind
from hil.errors import UsageError


class Farm:
    """Fake connection. The result of job 17 has an exit code of the command."""

    def __init__(self, address: object, **settings: object) -> None:
        pass

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, what: str, **arguments: Any) -> Any:
        spec = {"kind": "command", "options": {"command": ["x"]}, "files": {}, "affinity": "", "title": ""}
        result = {"exit_code": 77, "outcome": "FAIL", "reason": "the command ended with exit code 77"}
        return parsed(what, [{"name": "17", "state": "done", "spec": spec, **result}])

    def follow(self, jobs: Any, *, logs: bool) -> Any:
        return iter(())


@pytest.fixture
def sent() -> list[tuple[Workload, dict[str, Any]]]:
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> Callable[..., Any]:
    def send(farm: Farm, load: Workload, how: dict[str, Any], **_: Any) -> SubmitReceipt:
        sent.append((load, how))
        return SubmitReceipt(17, ["17"], 0)

    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", Farm)
    monkeypatch.setattr("hil.controller.farm.client.submitting.submit", send)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    return lambda *words, **settings: CliRunner().invoke(farm, ["submit", *map(str, words)], **settings)


def test_submit_sends_command_files_and_patterns(run: Callable[..., Any], sent: list[Any], tmp_path: Path) -> None:
    image, script = tmp_path / "image.bin", tmp_path / "flash.sh"
    image.write_bytes(b"image")
    script.touch(0o755)
    options = ("--select", "chip=a76", "--send", image, "--send", script, "--keep", "*.log", "--json")
    done = run(*options, "--", "./flash.sh", "--wait", "image.bin")
    assert done.exit_code == 0, done.output
    check_document(json.loads(done.stdout), "farm submit", "farm")
    [(load, how)] = sent
    [spec] = load.specs
    assert (spec.kind, spec.options) == (
        Kind.COMMAND,
        {"command": ["./flash.sh", "--wait", "image.bin"], "keep": ["*.log"], "executable": ["flash.sh"]},
    )
    assert list(spec.files) == ["image.bin", "flash.sh"] and list(load.uploads.values()) == [image, script]
    assert (how["selector"], how["max_attempts"], load.title) == ("chip=a76", 1, "./flash.sh --wait image.bin")
    assert run("--max-attempts", 3, "--", "true").exit_code == 0 and sent[1][1]["max_attempts"] == 3


def test_wait_exits_with_exit_code_of_command(run: Callable[..., Any]) -> None:
    done = run("--wait", "--", "true", standalone_mode=False)
    assert (done.return_value, done.stdout) == (77, "FAIL  job 17  the command ended with exit code 77\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--"], "missing command after --"),
        (["model.onnx", "--", "true"], "'model.onnx' before --"),
        (["--rtol", "0.1", "--", "true"], "--rtol does not apply to commands"),
        (["--runtime", "iree", "--", "true"], "--runtime does not apply to commands"),
        (["--suite", "--", "true"], "--suite does not apply to commands"),
        (["--board", "a", "--board", "a", "--", "true"], "--board a is given twice"),
        (["--board", "a", "--select", "x", "--select", "y", "--", "true"], "--board accepts a single --select"),
        (["--board", "a", "--count", "2", "--", "true"], "--count applies only to --select"),
        (["--select", "x", "--select", "y", "--count", "9", "--", "true"], "at most 16 boards, got 18"),
        (["--count", "2", "model.onnx"], "--count applies only to commands"),
        (["--timeout", "0", "--", "true"], "--timeout must be above 0"),
        (["--keep", "../x", "--", "true"], "invalid pattern"),
        (["--send", "missing.bin", "--", "true"], "no such file: missing.bin"),
        (["--", ""], "program is empty"),
        (["--keep", "*.log", "model.onnx"], "--keep applies only to commands"),
    ],
)
def test_submit_rejects_invalid_commands(run: Callable[..., Any], sent: list[Any], words: list[str], text: str) -> None:
    ended = run(*words)
    assert isinstance(ended.exception, UsageError) and text in str(ended.exception), ended.output
    assert sent == []


def test_sent_files_with_equal_names_are_rejected(run: Callable[..., Any], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.bin").touch()
    ended = run("--send", tmp_path / "a" / "x.bin", "--send", tmp_path / "b" / "x.bin", "--", "true")
    assert "several files are named x.bin" in str(ended.exception)

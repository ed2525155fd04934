"""With --json, each command prints one document that matches docs/run.schema.json, for every invalid command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from support.schemas import check_document

from hil.controller.cli import main
from hil.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RAN, EXIT_USAGE

CHECKED = (click.Choice, click.types.IntParamType, click.types.FloatParamType)
BROKEN = b"[[[ \xff not a TOML, JSON, ONNX or npz file"


# Commands that accept every name as an argument: they create what does not exist, or only list names.
CREATE = {("new-plugin",), ("farm", "install"), ("triage", "set"), ("suite", "list")}


@dataclass(frozen=True)
class Failure:
    """A failed command."""

    code: int
    document: Any
    err: str

    @property
    def text(self) -> str:
        return f"{self.document['error']['message']} {self.document['error']['hint']}"


def list_commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the commands with --json."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from list_commands(found, *path, name)
    elif find_option(command, "--json"):
        yield path, command


def find_option(command: click.Command, name: str) -> click.Option | None:
    return next((one for one in command.params if isinstance(one, click.Option) and name in one.opts), None)


COMMANDS = dict(list_commands(main.cli))
NAMES = [pytest.param(path, id=" ".join(path)) for path in COMMANDS]


def make_arguments(command: click.Command, without: str = "", word: str = "") -> list[str]:
    """Return words for the required arguments and options, which name missing things unless `word` is given."""
    words: list[str] = []
    for one in command.params:
        if isinstance(one, click.Argument) and one.required:
            choices = one.type.choices if isinstance(one.type, click.Choice) else ()
            words += [str(choices[0]) if choices else word or f"no-such-{one.name}"] * max(one.nargs, 1)
        elif isinstance(one, click.Option) and one.required and one.opts[0] != without:
            choices = one.type.choices if isinstance(one.type, click.Choice) else ()
            words += [one.opts[0], str(choices[0]) if choices else "1"]
    return words


@pytest.fixture
def fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[Sequence[str]], Failure]:
    """Return a function that runs a command in an empty directory and home, and checks its document."""
    for name in ("HIL_BOARD", "HIL_FARM", "HIL_FARM_TOKEN", "HIL_WEB_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "HIL_CACHE_DIR", "HIL_FARM_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def call(words: Sequence[str]) -> Failure:
        monkeypatch.setattr(sys, "argv", ["hil", *words, "--json"])
        code = main.call()
        out, err = capfd.readouterr()
        assert code in (1, 2, 3, 4, 5, EXIT_INTERRUPTED), (words, code, out, err)
        assert "Traceback" not in err and err.strip(), (words, err)
        document = json.loads(out)
        check_document(document, "error", "run")
        assert document["exit_code"] == code
        assert document["error"]["message"] in err.replace("\n", " ") or document["error"]["message"] in err
        return Failure(code, document, err)

    return call


@pytest.mark.parametrize("path", NAMES)
def test_unknown_option_prints_error_document(path, fail) -> None:
    failure = fail([*path, "--jsno"])
    assert failure.code == EXIT_USAGE
    assert "'--jsno'" in failure.text and "'--json'" in failure.document["error"]["hint"]


@pytest.mark.parametrize("path", [one for one in NAMES if make_arguments(COMMANDS[one.values[0]])])
def test_missing_argument_prints_error_document(path, fail) -> None:
    failure = fail(path)
    assert failure.code == EXIT_USAGE and failure.document["error"]["hint"]


@pytest.mark.parametrize("path", NAMES)
def test_invalid_option_value_prints_error_document(path, fail) -> None:
    command = COMMANDS[path]
    for one in command.params:
        if isinstance(one, click.Option) and isinstance(one.type, CHECKED):
            failure = fail([*path, *make_arguments(command, without=one.opts[0]), one.opts[0], "x-y"])
            assert failure.code == EXIT_USAGE
            assert one.opts[0] in failure.text and "'x-y'" in failure.text
            assert failure.document["error"]["hint"]


def test_unknown_option_suggests_no_argument(fail) -> None:
    assert fail(["board", "add", "--name", "x"]).document["error"]["hint"] == "hil board add --help lists the options"


def test_json_of_another_program_is_no_option_of_hil(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["hil", "farm", "submit", "--select", "sim", "--", "mytool", "--json"])
    assert main.call() == EXIT_USAGE
    assert capfd.readouterr().out == ""


def test_unknown_command_prints_error_document(fail) -> None:
    for words in (["rum", "x"], ["board", "lst"], ["farm", "tokn"]):
        failure = fail(words)
        assert failure.code == EXIT_USAGE and "did you mean" in failure.text


@pytest.mark.parametrize("path", NAMES)
def test_ctrl_c_prints_error_document(path, fail, monkeypatch) -> None:
    def interrupt(ctx: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS[path], "invoke", interrupt)
    monkeypatch.setattr(click.Path, "convert", lambda self, value, *_: value)
    monkeypatch.setattr(COMMANDS[path], "params", [one for one in COMMANDS[path].params if not one.required])
    failure = fail(path)
    assert failure.code == EXIT_INTERRUPTED
    assert failure.document["error"]["kind"] == "Interrupted"


WITH_BOARD = [one for one in NAMES if one.values[0] not in CREATE and find_option(COMMANDS[one.values[0]], "--board")]
WITH_ARGUMENTS = [one for one in NAMES if one.values[0] not in CREATE and make_arguments(COMMANDS[one.values[0]])]


@pytest.mark.parametrize("path", WITH_BOARD)
def test_unknown_board_prints_error_document(path, fail) -> None:
    fail([*path, *make_arguments(COMMANDS[path]), "--board", "simm"])


@pytest.mark.parametrize("path", WITH_ARGUMENTS)
def test_missing_thing_prints_error_document(path, fail) -> None:
    fail([*path, *make_arguments(COMMANDS[path])])


@pytest.mark.parametrize("path", WITH_ARGUMENTS)
def test_unreadable_file_prints_error_document(path, fail) -> None:
    for name in ("broken.onnx", "broken.toml", "broken.npy", "broken"):
        Path(name).write_bytes(BROKEN)
        fail([*path, *make_arguments(COMMANDS[path], word=name)])


@pytest.mark.parametrize("path", WITH_ARGUMENTS)
def test_directory_instead_of_file_prints_error_document(path, fail) -> None:
    Path("folder.onnx").mkdir()
    fail([*path, *make_arguments(COMMANDS[path], word="folder.onnx")])


@pytest.mark.parametrize("path", WITH_BOARD)
def test_broken_board_config_prints_error_document(path, fail) -> None:
    Path("broken.toml").write_bytes(BROKEN)
    fail([*path, *make_arguments(COMMANDS[path]), "--board", "broken.toml"])


@pytest.mark.parametrize("path", WITH_ARGUMENTS)
def test_broken_project_file_prints_error_document(path, fail) -> None:
    Path("hil.toml").write_text("[defaults]\nsede = 3\n")
    fail([*path, *make_arguments(COMMANDS[path])])


def test_suite_list_reports_directory_without_models(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", ["hil", "suite", "list", str(tmp_path)])
    assert main.call() == EXIT_NOTHING_RAN
    assert capfd.readouterr().err == f"hil: {tmp_path} has no cases\n"

"""Board, flow, directory of runs and web address in the project file: contents, precedence and trust."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hil.controller.cli.board.options import add_board_place, choose_place
from hil.controller.cli.commands import make_command
from hil.controller.cli.main import cli
from hil.controller.cli.options import boards_options, make_flow_option, run_options, runs_option, target_options
from hil.controller.pipeline.settings.project import load_project, read_project
from hil.errors import UsageError

Write = Callable[[str], Path]
KITCHEN = '[board]\nhw_type = "rpi5"\n[connection]\naddress = "root@rpi5"\n'
SIMULATOR = '[board]\nhw_type = "bench-sim"\n[simulator]\n'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the project file of the current directory, which is a repository."""
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("HIL_BOARD", "HIL_BOARDS"):
        monkeypatch.delenv(name, raising=False)

    def make(text: str) -> Path:
        (folder / "hil.toml").write_text(text)
        return folder / "hil.toml"

    return make


def write_board(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def trust(folder: Path) -> None:
    assert CliRunner().invoke(cli, ["board", "trust", str(folder)], catch_exceptions=False).exit_code == 0


def call(*words: str, options: Any = target_options) -> dict[str, Any]:
    """Return the settings of a command that runs models."""

    @make_command()
    @options
    @make_flow_option("iree", repeats=True)
    @run_options("seed")
    @runs_option
    @click.option("--resume", default="")
    def command(**settings: Any) -> dict[str, Any]:
        return settings

    found: dict[str, Any] = (
        CliRunner().invoke(command, list(words), standalone_mode=False, catch_exceptions=False).return_value
    )
    return found


def test_commands_use_keys_of_project_file(write: Write) -> None:
    path = write('[defaults]\nboard = "sim-f16"\nflow = "onnxruntime"\nout = "results/runs"\n')
    found = call()
    assert (found["board"], found["hw_type"], found["flow"]) == (("sim-f16",), (), ("onnxruntime",))
    assert found["out"] == path.parent / "results" / "runs"
    assert call(options=boards_options)["boards"] == ("sim-f16",)


def test_command_line_and_variable_override_board(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write('[defaults]\nboard = "sim-f16"\nruntime_hw_type = "sim-f16"\nflow = "onnxruntime"\nout = "a"\n')
    assert (call()["board"], call()["hw_type"]) == (("sim-f16",), ("sim-f16",))
    found = call("--board", "sim", "--flow", "iree", "--out", "b")
    assert (found["board"], found["hw_type"], found["flow"], found["out"]) == (("sim",), (), ("iree",), Path("b"))
    typed = call("--runtime-hw-type", "sim-int8")
    assert (typed["board"], typed["hw_type"]) == ((), ("sim-int8",))
    monkeypatch.setenv("HIL_BOARD", "sim-bf16")
    assert (call()["board"], call()["hw_type"]) == (("sim-bf16",), ())


def test_resumed_command_uses_only_directory_of_runs(write: Write) -> None:
    path = write('[defaults]\nseed = 5\nboard = "sim-f16"\nflow = "onnxruntime"\nout = "runs"\n')
    found = call("--resume", "it")
    assert (found["board"], found["flow"], found["seed"], found["out"]) == ((), ("iree",), 0, path.parent / "runs")


def test_commands_print_used_keys(write: Write) -> None:
    path = write('[defaults]\nboard = "sim"\nout = "runs"\nweb_url = "http://lab:8790"\n')
    done = CliRunner().invoke(cli, ["runs", "list"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, f"hil: {path}: out\n")
    assert CliRunner().invoke(cli, ["runs", "list", "--out", "a"], catch_exceptions=False).stderr == ""


@pytest.mark.parametrize("value", ["3", '""', '["sim"]'])
def test_invalid_value_names_file_and_key(write: Write, value: str) -> None:
    path = write(f"[defaults]\nboard = {value}\n")
    with pytest.raises(UsageError) as caught:
        read_project(path)
    assert caught.value.message.startswith(f"{path}: [defaults] board must be a string")


@pytest.mark.parametrize("key", ["board", "runtime_hw_type"])
@pytest.mark.parametrize(
    "value", ["root@10.0.0.7", "ssh:pi", "unix:/tmp/x", "farm:", "kitchen", "board_configs/kitchen.toml"]
)
def test_board_outside_of_simulators_needs_trust(write: Write, key: str, value: str) -> None:
    path = write(f'[defaults]\n{key} = "{value}"\n')
    write_board(path.parent / "board_configs", "kitchen", KITCHEN)
    with pytest.raises(UsageError, match=rf"need trust: \[defaults\] {key}"):
        call()
    assert call("--board", "sim")["board"] == ("sim",)  # the key is not used


def test_board_of_the_user_needs_trust(write: Write, tmp_path: Path) -> None:
    path = write('[defaults]\nboard = "garage"\n')
    write_board(tmp_path / "config" / "hil" / "boards", "garage", KITCHEN)
    with pytest.raises(UsageError, match="hil board trust"):
        call()
    trust(path.parent)
    assert call()["board"] == ("garage",)


def test_host_of_ssh_config_needs_trust(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "config").write_text("Host kitchen\n  HostName 10.0.0.7\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write('[defaults]\nboard = "kitchen"\n')
    with pytest.raises(UsageError, match=r"settings that need trust: \[defaults\] board"):
        read_project(file).use_board()
    trust(file.parent)
    assert read_project(file).use_board() == ("kitchen", "")
    assert call()["board"] == ("kitchen",)


def test_trusted_project_cannot_select_untrusted_config(write: Write) -> None:
    path = write('[defaults]\nboard = "kitchen"\n')
    kitchen = write_board(path.parent / "board_configs", "kitchen", KITCHEN)
    trust(path.parent)
    assert call()["board"] == ("kitchen",)
    kitchen.write_text(KITCHEN + '[power]\nreset = "reboot-it"\n')
    with pytest.raises(UsageError, match=r"kitchen.toml has been altered.*selected by .*hil.toml"):
        call()


@pytest.mark.parametrize("board", ["sim", "sim-f16", "bench"])
def test_simulators_need_no_trust(write: Write, board: str) -> None:
    path = write(f'[defaults]\nboard = "{board}"\n')
    write_board(path.parent / "board_configs", "bench", SIMULATOR)
    assert call()["board"] == (board,)


def test_simulator_with_commands_needs_trust(write: Write) -> None:
    path = write('[defaults]\nboard = "bench"\n')
    write_board(path.parent / "board_configs", "bench", SIMULATOR + '[measure]\nbefore = ["touch /tmp/x"]\n')
    with pytest.raises(UsageError, match=r"\[defaults\] board"):
        call()


def test_board_config_of_project_is_found_in_subdirectory(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('[defaults]\nboard = "bench"\n')
    config = write_board(path.parent / "board_configs", "bench", SIMULATOR)
    (path.parent / "sub").mkdir()
    monkeypatch.chdir(path.parent / "sub")
    assert call()["board"] == (str(config),)


def test_flow_file_needs_trust_and_is_part_of_it(write: Write) -> None:
    path = write('[defaults]\nflow = "mine.toml:fast"\n')
    flows = path.parent / "mine.toml"
    flows.write_text('[fast]\nruntime = "iree"\ncompile_flags = ["--x"]\n')
    with pytest.raises(UsageError, match=r"need trust: \[defaults\] flow"):
        call()
    trust(path.parent)
    assert call()["flow"] == (f"{flows}:fast",)
    flows.write_text('[fast]\nruntime = "iree"\ncompile_flags = ["--y"]\n')
    with pytest.raises(UsageError, match="has been altered"):
        call()


@pytest.mark.parametrize(("out", "needs"), [("runs", False), ("a/../runs", False), ("../runs", True), ("/tmp", True)])
def test_directory_of_runs_outside_of_project_needs_trust(write: Write, out: str, needs: bool) -> None:
    assert bool(read_project(write(f'[defaults]\nout = "{out}"\n')).asks) is needs


def test_directory_of_runs_behind_link_needs_trust(write: Write, tmp_path: Path) -> None:
    path = write('[defaults]\nout = "runs"\n')
    (path.parent / "runs").symlink_to(tmp_path)
    assert read_project(path).asks == ("[defaults] out",)


def test_web_address_needs_trust(write: Write) -> None:
    path = write('[defaults]\nweb_url = "http://127.0.0.1:1"\n')
    done = CliRunner().invoke(cli, ["publish", "latest"])
    assert isinstance(done.exception, UsageError) and "need trust: [defaults] web_url" in done.exception.message
    trust(path.parent)
    done = CliRunner().invoke(cli, ["publish", "latest"])
    assert (
        isinstance(done.exception, UsageError)
        and "token required to publish to http://127.0.0.1:1" in done.exception.message
    )


def test_untrusted_keys_do_not_block_other_commands(write: Write) -> None:
    path = write('[defaults]\nboard = "root@rpi5"\nout = "/tmp/x"\nweb_url = "http://lab"\nseed = 5\n')
    assert load_project(path.parent) is not None
    assert call("--board", "sim", "--out", "x")["seed"] == 5


def test_board_commands_use_project_board(write: Write) -> None:
    path = write('[defaults]\nboard = "sim-f16"\n')

    @make_command()
    @add_board_place
    def command(**settings: Any) -> str:
        return choose_place(settings).name

    def choose(*words: str) -> str:
        name: str = CliRunner().invoke(command, list(words), standalone_mode=False, catch_exceptions=False).return_value
        return name

    assert (choose(), choose("sim"), choose("--runtime-hw-type", "sim-int8")) == ("sim-f16", "sim", "sim-int8")
    path.write_text('[defaults]\nboard = "root@rpi5"\n')
    assert choose("sim") == "sim"
    with pytest.raises(UsageError, match="need trust"):
        choose()

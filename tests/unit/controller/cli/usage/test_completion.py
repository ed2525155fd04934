"""Completion of values, as the scripts of `hil completion` ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hil.controller.cli.main import call, cli
from hil.controller.cli.usage.completion import SHELLS, VARIABLE
from hil.core.runtimes import RUNTIMES


def list_commands(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from list_commands(found, *above, name)
        else:
            yield " ".join((*above, name)), found


COMMANDS = dict(list_commands(cli))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home and working directory."""
    for name in ("HIL_BOARDS", "HIL_BOARD", "XDG_CONFIG_HOME", "COMP_LINE", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def complete(monkeypatch, capsys):
    """Return the function that completes a command line: kind and value of each candidate."""

    def run(line: str, shell: str = "bash", **environment: str) -> list[tuple[str, str]]:
        for name, value in {VARIABLE: f"{shell}_complete", "COMP_LINE": line, **environment}.items():
            monkeypatch.setenv(name, value)
        assert call() == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        lines = shown.out.splitlines()
        if shell == "zsh":
            return list(zip(lines[::3], lines[1::3], strict=True))
        return [(one.partition(",")[0], one.partition(",")[2].partition("\t")[0]) for one in lines if one]

    return run


def plain(found: list[tuple[str, str]]) -> list[str]:
    assert {kind for kind, _ in found} <= {"plain"}
    return [value for _, value in found]


def test_completes_boards_and_ssh_hosts(complete, home):
    (home / ".config" / "hil" / "boards").mkdir(parents=True)
    (home / ".config" / "hil" / "boards" / "kitchen.toml").write_text("")
    (home / ".ssh" / "config").write_text("Host lab kit-*\nHost\tkit\nInclude more\nMatch host x\n")
    (home / ".ssh" / "more").write_text("host = kitty # comment\n")
    assert plain(complete("hil run m.onnx --board ki")) == ["kitchen", "kit", "kitty"]
    assert plain(complete("hil board check ki")) == ["kitchen", "kit", "kitty"]
    assert plain(complete("hil board remove ")) == ["kitchen"]
    assert "sim-f16" in plain(complete("hil bench m.onnx --runtime-hw-type "))
    assert complete("hil run m.onnx --board ./bo") == [("file", "./bo")]


def test_ignores_names_that_a_shell_would_run(complete, home):
    Path("board_configs").mkdir()
    for name in ("x$(touch y)", "x;y", "x y", "xfine"):
        Path("board_configs", f"{name}.toml").write_text("")
    assert plain(complete("hil run --board x")) == ["xfine"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hil run m.onnx --reference onnx", ["onnxruntime", "onnx-reference"]),
        ("hil suite run m --flow iree-f", None),
        ("hil run m.onnx --fault corr", ["corrupt"]),
        ("hil run m.onnx --fault corrupt:elements=3,s", ["corrupt:elements=3,share=", "corrupt:elements=3,seed="]),
        ("hil run m.onnx --accept cos", ["cosine"]),
        ("hil run m.onnx --accept 'logits:top1>=0.9,cos", ["logits:top1>=0.9,cosine"]),
        ("hil run m.onnx --arithmetic b", ["bfloat16"]),
        ("hil suite run @", ["@operators", "@models"]),
        ("hil bundle export x.hilb --to g", ["golden"]),
        ("hil gate --fail-on regressed,br", ["regressed,broken"]),
        ("hil run example:digits_cnn_", ["example:digits_cnn_batch", "example:digits_cnn_int8"]),
        ("hil bench example:digits_t", ["example:digits_test"]),
        ("hil help board ch", ["check"]),
        ("hil help comp", ["compile", "compare", "completion"]),
    ],
)
def test_completes_value(complete, home, line, expected):
    found = plain(complete(line))
    if expected is None:
        from hil.controller.models.flows.flow_registry import load_flows

        expected = [name for name in load_flows() if name.startswith("iree-f")]
        assert expected
    assert found == expected


def test_completes_runtimes(complete, home):
    for line in ("hil run m.onnx --runtime ", "hil suite run m --runtime ", "hil board check x --runtime "):
        assert plain(complete(line)) == list(RUNTIMES)


def test_does_not_load_known_failures(complete, home, monkeypatch):
    loaded: list[str] = []
    monkeypatch.setattr("hil.controller.web.publish.known_failures.load_known", loaded.append)
    assert plain(complete("hil suite run m.onnx --known http://farm --fl")) == ["--flow"]
    assert loaded == []


def test_completes_flows_of_working_directory(complete, home):
    Path("flows.toml").write_text('[mine]\nruntime = "iree"\n')
    assert plain(complete("hil suite run m --flow mi")) == ["mine"]
    Path("flows.toml").write_text("not toml [")
    assert "iree" in plain(complete("hil suite run m --flow iree"))


def test_completes_ids_of_stored_runs(complete, home):
    for name, record in (("20260101-a", "run.json"), ("20260102-b", "matrix.json"), ("20260103-c", "reduce.json")):
        Path("hil-runs", name).mkdir(parents=True)
        Path("hil-runs", name, record).write_text("{}")
    runs = ["latest", "20260102-b", "20260101-a"]
    for line in ("hil runs show ", "hil runs rm 20260101-a ", "hil run --resume ", "hil compare x "):
        assert plain(complete(line)) == runs, line
    assert plain(complete("hil reduce --resume ")) == ["latest", "20260103-c"]
    Path("hil-runs").rename("elsewhere")
    assert plain(complete("hil runs show --out elsewhere 2026")) == runs[1:]
    assert complete("hil runs show x") == [("file", "x")]
    Path("hil.toml").write_text('[defaults]\nout = "elsewhere"\n')
    assert plain(complete("hil runs show 2026")) == runs[1:]
    Path("hil.toml").write_text('[defaults]\nout = "../elsewhere"\n')
    assert complete("hil runs show 2026") == [("file", "2026")]  # not trusted


@pytest.mark.parametrize("line", ["hil run exa", "hil bench exa", "hil run m.onnx --input image=exa"])
def test_completes_files(complete, home, line):
    assert [kind for kind, _ in complete(line)] == ["file"]


def test_bash_replaces_only_text_after_separator(complete, home):
    (home / ".ssh" / "config").write_text("Host lab\n")
    breaks = {"COMP_WORDBREAKS": " \t\n\"'><=;|&(:"}
    assert plain(complete("hil run --board ssh:l", **breaks)) == ["lab"]
    assert plain(complete("hil run --board=sim-f", **breaks)) == ["sim-f16"]
    assert plain(complete('hil run --board "ssh:l', **breaks)) == ["ssh:lab"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_replace_whole_word(complete, home, shell):
    (home / ".ssh" / "config").write_text("Host lab\n")
    assert plain(complete("hil run --board=ssh:l", shell)) == ["--board=ssh:lab"]


def test_completes_commands_without_loading_them(complete, home):
    assert plain(complete("hil bun")) == ["bundle"]
    assert plain(complete("hil runs ")) == ["export", "gc", "list", "rm", "show"]
    assert "--runtime-hw-type" in plain(complete("hil run --runtime"))


@pytest.mark.parametrize("line", ["", "hil", "hil run 'x", "hil nothing ", "hil run --nothing ", "hil runs show \0"])
def test_survives_any_line(complete, home, line, monkeypatch):
    if "\0" in line:
        line = line.replace("\0", "\x01\udcff")
    complete(line)


@pytest.mark.parametrize(
    ("shell", "variables", "message"),
    [
        *((shell, {}, "missing environment variable COMP_WORDS") for shell in SHELLS),
        *((shell, {"COMP_WORDS": "hil ru"}, "missing environment variable COMP_CWORD") for shell in SHELLS),
        ("bash", {"COMP_WORDS": "hil ru", "COMP_CWORD": "-1"}, "invalid COMP_CWORD '-1'"),
        ("zsh", {"COMP_WORDS": "hil ru", "COMP_CWORD": "x"}, "invalid COMP_CWORD 'x'"),
    ],
)
def test_reports_bad_variables(home, monkeypatch, capsys, shell, variables, message):
    for name, value in {VARIABLE: f"{shell}_complete", **variables}.items():
        monkeypatch.setenv(name, value)
    assert call() == 2
    shown = capsys.readouterr()
    assert message in shown.err and f"hil completion {shell}" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("value", ["bash", "bash_", "bash_run", "tcsh_complete", "x"])
def test_reports_bad_instruction(home, monkeypatch, capsys, value):
    monkeypatch.setenv(VARIABLE, value)
    assert call() == 2
    assert "expected one of bash_complete" in capsys.readouterr().err


def test_errors_print_nothing(home, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("hil.core.boards.list_boards", fail)
    for name, value in {VARIABLE: "bash_complete", "COMP_LINE": "hil run --board "}.items():
        monkeypatch.setenv(name, value)
    assert call() == 2
    assert capsys.readouterr() == ("", "")


# Options whose values other parts of hil define, and their exceptions: values of a farm or of another tool.
_OPTIONS = ("--board", "--runtime-hw-type", "--runtime", "--reference", "--flow", "--fault", "--accept", "--input")
_OTHERS = {"farm submit --board", "farm lease --board", "farm events --board"}
_OTHERS |= {"history import --board", "profile import --board"}
_FILES = {"bundle verifier --runtime"}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_with_names_have_completion(name):
    missing = [
        f"{name} {option.opts[0]}"
        for option in COMMANDS[name].params
        if (option.opts[0] in _OPTIONS or option.opts[0].endswith("resume")) and not completes(option)
    ]
    assert set(missing) <= _OTHERS | _FILES


def completes(option: click.Parameter) -> bool:
    is_flag = isinstance(option, click.Option) and option.is_flag
    return is_flag or isinstance(option.type, click.Path) or option._custom_shell_complete is not None


def test_completion_runs_no_callback(complete, home, monkeypatch):
    """A callback may read the URL of --known."""
    for command in COMMANDS.values():
        for option in command.params:
            if option.callback is not None:
                monkeypatch.setattr(option, "callback", lambda *_: pytest.fail("a callback was called"))
    assert plain(complete("hil suite run m --known http://lab --seed 3 --arithmetic b")) == ["bfloat16"]

"""Test all commands: hil rejects a repeated option that takes one value."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

from hil.controller.cli.analysis.layers import shorten_op
from hil.controller.cli.commands import CliCommand, CliGroup
from hil.controller.cli.help_sections import MIN_OPTIONS, SECTIONS
from hil.controller.cli.main import cli
from hil.controller.storage.sources.origin import get_typed_command
from hil.errors import UsageError


def commands_of(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands_of(found, *above, name)
        else:
            yield " ".join((*above, name)), found


COMMANDS = dict(commands_of(cli))


def refused(command: click.Command, *words: str) -> str:
    with pytest.raises(UsageError) as error:
        command.make_context("it", list(words))
    return error.value.message


SINGLE = {
    name: [
        one.opts[0]
        for one in command.params
        if isinstance(one, click.Option) and not (one.multiple or one.is_flag or one.count)
    ]
    for name, command in COMMANDS.items()
}


def test_single_value_options_are_found():
    assert {"--timeout", "--rtol"} < set(SINGLE["run"])
    assert not {"--input", "--json"} & set(SINGLE["run"])


@pytest.mark.parametrize("name", [name for name, flags in SINGLE.items() if flags])
def test_commands_reject_repeated_single_value_option(name: str):
    command = COMMANDS[name]
    assert isinstance(command, CliCommand)
    for flag in SINGLE[name]:
        assert refused(command, flag, "1", flag, "1") == f"{flag} is specified 2 times, but accepts a single value"


def test_suite_run_rejects_exclusive_options():
    run = COMMANDS["suite run"]
    assert refused(run, "models", "--merge", "shape", "--no-merge") == "--merge and --no-merge are mutually exclusive"
    assert refused(run, "models", "--layers", "--no-layers") == (
        "--layers/--no-layers is specified 2 times, but accepts a single value"
    )


def test_command_accepts_repeated_flag():
    assert COMMANDS["runs list"].make_context("it", ["--json", "--json"]).params["as_json"] is True


@pytest.mark.parametrize(
    ("history", "stored"),
    [
        ("postgresql://anna:secret@lab/x", "postgresql://***@lab/x"),
        ("postgresql://lab/x?sslmode=require&password=secret", "postgresql://lab/x?sslmode=require&password=***"),
        ("postgresql://anna@lab/x", "postgresql://anna@lab/x"),
    ],
)
def test_stored_command_has_no_password(history: str, stored: str) -> None:
    COMMANDS["gate"].make_context("hil gate", ["--history", history])
    assert get_typed_command() == shlex.join(["hil", "gate", "--history", stored])


@pytest.mark.parametrize(("file", "shown"), [("a.onnx", 'hil.toml: models."a.onnx"'), ("b.onnx", "")])
def test_run_shows_project_only_if_settings_apply(file, shown, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hil.toml").write_text('[models."a.onnx"]\nseed = 3\n')
    (tmp_path / file).touch()
    COMMANDS["run"].make_context("run", [file])
    found = capsys.readouterr().err.strip()
    assert found.endswith(shown) if shown else found == ""


def test_group_creates_hil_commands():
    assert isinstance(cli, CliGroup) and CliGroup.command_class is CliCommand


def helps(command: click.Command, name: str = "hil", parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yield the name and help of a command and of its subcommands."""
    context = click.Context(command, info_name=name, parent=parent)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from helps(found, below, context)


def test_help_texts_hide_markup_characters() -> None:
    found = dict(helps(cli))
    assert len(found) > 50
    assert [name for name, text in found.items() if "\b" in text] == []


def declared_options(command: click.Command) -> set[str]:
    return {str(one.name) for one in command.params if isinstance(one, click.Option)}


LONG = {name: command for name, command in COMMANDS.items() if len(declared_options(command)) >= MIN_OPTIONS}


@pytest.mark.parametrize("name", LONG)
def test_every_option_of_long_help_has_section(name: str):
    sections = {option for names in SECTIONS.values() for option in names}
    assert declared_options(LONG[name]) <= sections


def test_help_sections_name_existing_options_once():
    names = [option for section in SECTIONS.values() for option in section]
    assert len(names) == len(set(names))
    assert set(names) <= {option for command in LONG.values() for option in declared_options(command)}


def test_run_help_groups_options_by_purpose():
    text = LONG["run"].get_help(click.Context(LONG["run"], info_name="hil run"))
    titles = [line[:-1] for line in text.splitlines() if line[:1].isalpha() and line.endswith(":")]
    expected = ["Board", "Model and inputs", "References and criteria", "Measurement", "Debugging", "Output"]
    assert titles == expected
    board, measurement = (text.index(f"\n{title}:") for title in ("Board", "Measurement"))
    assert board < text.index("--identity") < measurement < text.index("--iterations")


def test_short_help_has_single_section():
    command = COMMANDS["board ping"]
    text = command.get_help(click.Context(command, info_name="hil board ping"))
    assert "\nOptions:\n" in text
    assert "\nBoard:\n" not in text


def test_help_lists_both_names_of_an_option():
    command = COMMANDS["suite run"]
    text = command.get_help(click.Context(command, info_name="hil suite run"))
    assert "--no-merge" in text
    assert "--merge [" in text


def test_layers_shortens_long_list_of_operators():
    assert shorten_op("Conv+Relu") == "Conv+Relu"
    assert shorten_op("+".join(["If", *["Unsqueeze"] * 5, "Add"])) == "If+5 more+Add"


OPTIONS = [(name, one) for name, command in COMMANDS.items() for one in command.params if isinstance(one, click.Option)]


def find_placeholders(option: str) -> dict[str, str]:
    """Return command -> placeholder of an option's value."""
    return {name: one.make_metavar(click.Context(COMMANDS[name])) for name, one in OPTIONS if option in one.opts}


def test_out_is_a_directory_and_output_a_file():
    assert set(find_placeholders("--out").values()) == {"DIR"}
    # The score of an output of the model.
    assert {one for name, one in find_placeholders("--output").items() if name != "eval"} == {"FILE"}
    assert all("-o" in one.opts for name, one in OPTIONS if "--output" in one.opts and name != "eval")


def test_times_have_one_placeholder():
    assert set(find_placeholders("--timeout").values()) == {"S"}
    assert set(find_placeholders("--since").values()) <= {"TIME", "BASELINE"}


def test_options_have_help_and_placeholder_of_hil():
    for name, one in OPTIONS:
        metavar = "" if one.is_flag else one.make_metavar(click.Context(COMMANDS[name]))
        assert one.help or one.hidden, f"{name} {one.opts}"
        assert not {"INTEGER", "FLOAT", "RANGE"} & set(metavar.split()), f"{name} {one.opts}: {metavar}"


def test_commands_have_example():
    assert [name for name, command in COMMANDS.items() if "Example" not in (command.epilog or "")] == []

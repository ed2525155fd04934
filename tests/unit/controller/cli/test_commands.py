"""What holds for all commands: an option that takes one value is never given several of which the last one counts."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from hil.controller.cli.commands import Command, Group
from hil.controller.cli.main import cli
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


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_of_one_value_is_refused_a_second_one(name: str):
    command = COMMANDS[name]
    assert isinstance(command, Command)
    single = [
        one
        for one in command.params
        if isinstance(one, click.Option) and not (one.multiple or one.is_flag or one.count)
    ]
    for option in single:
        flag = option.opts[0]
        assert refused(command, flag, "1", flag, "1") == f"{flag} is given 2 times, and has one value"


def test_two_options_for_one_value_exclude_each_other():
    run = COMMANDS["suite run"]
    assert refused(run, "models", "--merge", "shape", "--no-merge") == "--merge and --no-merge exclude each other"
    assert refused(run, "models", "--layers", "--no-layers") == (
        "--layers/--no-layers is given 2 times, and has one value"
    )


def test_a_switch_may_be_given_again():
    assert COMMANDS["runs list"].make_context("it", ["--json", "--json"]).params["as_json"] is True


def test_a_group_has_such_commands():
    assert isinstance(cli, Group) and Group.command_class is Command


def helps(command: click.Command, name: str = "hil", parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """The help of a command and of all below it, each with its name."""
    context = click.Context(command, info_name=name, parent=parent)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from helps(found, below, context)


def test_no_help_shows_how_its_text_was_marked() -> None:
    found = dict(helps(cli))
    assert len(found) > 50
    assert [name for name, text in found.items() if "\b" in text] == []

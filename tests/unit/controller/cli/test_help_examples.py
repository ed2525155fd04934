"""The examples in the help of each command are valid command lines of this command."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from hil.controller.cli.main import cli

# Start of an example: variables and `env` may precede `hil`.
EXAMPLE = re.compile(r"^ *(?:Examples?: *)?(?:env )?(?:[A-Z_]+=\S+ )*hil (?P<words>\S.*)$")
NUMBERS = (click.Choice, click.types.IntParamType, click.types.FloatParamType)


def list_examples(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each command with its examples."""
    # In a help text, examples are indented. Sentences may also begin with the name of hil.
    examples = [line for line in inspect.cleandoc(command.help or "").splitlines() if line.startswith("  ")]
    lines = "\n".join([*examples, *(command.epilog or "").splitlines()]).replace("\\\n", "").splitlines()
    for line in lines:
        found = EXAMPLE.match(line)
        for text in found["words"].split("; hil ") if found else ():
            yield path, re.split(r" (?:\||&&|>|#|&$) ?", text)[0].strip()
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from list_examples(inner, *path, name)


EXAMPLES = list(list_examples(cli))


def test_examples_are_found() -> None:
    assert len(EXAMPLES) > 100


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=[text for _, text in EXAMPLES])
def test_example_is_valid(path: tuple[str, ...], example: str) -> None:
    words = shlex.split(example)
    command: click.Command = cli
    while isinstance(command, click.Group) and words and words[0] in command.list_commands(click.Context(command)):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None
        command = found
    assert " ".join(path) in example or not path, "an example of another command"
    context = click.Context(command)
    values, rest, _ = command.make_parser(context).parse_args(words)
    assert not rest or (isinstance(command, click.Group) and not command.no_args_is_help), rest
    for one in command.params:
        given = values.get(one.name)
        missing = given is None or isinstance(given, type(values)) or repr(given).startswith("Sentinel")
        assert not (one.required and missing), f"{one.name} is missing"
        if isinstance(one.type, NUMBERS) and not missing and not (isinstance(one, click.Option) and one.is_flag):
            for value in given if isinstance(given, (list, tuple)) else [given]:
                one.type.convert(value, one, context)


@pytest.mark.parametrize(("path", "example"), EXAMPLES, ids=[text for _, text in EXAMPLES])
def test_help_prints_example_on_one_line(path: tuple[str, ...], example: str) -> None:
    done = CliRunner().invoke(cli, [*path, "--help"])
    assert any(example in line for line in done.stdout.splitlines())

"""The JSON schemas in docs/ match the types, and describe every command with --json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import click
import jsonschema
import pytest

from hil.controller.cli.main import cli
from hil.protocol.v1 import farm_pb2 as pb
from tools.schemas import DOCS, FILES, write_schema

# Commands that docs/run.schema.json or the definition "matrix" describes, and `hil farm watch`, which prints lines.
OTHER_COMMANDS = {"run", "runs show", "suite matrix", "farm watch"}
# Documents without a command of this name, and parts of documents.
OTHER_DOCUMENTS = {"matrix", "python -m hil.agent verify"}


@pytest.mark.parametrize("name", FILES)
def test_schema_file_matches_types(name: str) -> None:
    assert (DOCS / f"{name}.schema.json").read_text() == write_schema(name), "run: .venv/bin/python -m tools.schemas"


@pytest.mark.parametrize("name", FILES)
def test_schema_is_valid_and_uses_each_definition(name: str) -> None:
    schema = json.loads(write_schema(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    definitions, file = schema["$defs"], FILES[name]
    used: set[str] = set()
    new = {*file.printed, *file.other}
    while new:
        used |= new
        new = {one for title in new for one in list_references(definitions[title])} - used
    assert set(definitions) - used == set()


def test_commands_have_schemas() -> None:
    described = {*FILES["commands"].printed, *FILES["farm"].printed} - OTHER_DOCUMENTS
    assert described == {*list_commands(cli, click.Context(cli))} - OTHER_COMMANDS


@pytest.mark.parametrize(("request_type", "group"), [(pb.AskRequest, "question"), (pb.DoRequest, "action")])
def test_farm_answers_have_schemas(request_type: Any, group: str) -> None:
    fields = request_type.DESCRIPTOR.oneofs_by_name[group].fields
    assert {field.name for field in fields} <= {*FILES["farm"].other}


def list_references(definition: object) -> Iterator[str]:
    """Yield the names of definitions that a definition refers to."""
    for name in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(definition)):
        yield name.replace("%20", " ")


def list_commands(command: click.Command, context: click.Context, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the commands with --json."""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from list_commands(found, context, (*path, name))
    if any("--json" in option.opts for option in command.params):
        yield " ".join(path)

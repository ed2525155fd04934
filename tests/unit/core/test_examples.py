"""Examples that hil contains."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest

from hil.controller.cli.main import cli
from hil.controller.cli.options import MODEL
from hil.core.examples import FILES, PREFIX, find_examples_folder, locate_example
from hil.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", FILES)
def test_example_is_file_in_checkout_and_wheel(name):
    path = Path(locate_example(f"{PREFIX}{name}"))
    assert path == find_examples_folder() / FILES[name] and path.is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included[f"examples/digits/{FILES[name]}"] == f"hil/controller/workloads/suites/zoo/digits/{FILES[name]}"


def test_unknown_example_suggests_similar_name():
    with pytest.raises(UsageError, match="unknown example 'example:digits'") as error:
        MODEL.convert("example:digits", None, None)
    assert "did you mean 'example:digits_cnn'" in error.value.hint


def test_other_paths_are_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("example:mine").touch()
    for text in ("net.onnx", "./example:digits_cnn", "example:mine"):
        assert MODEL.convert(text, None, None) == Path(text)


def list_help(group: click.Group) -> list[str]:
    context = click.Context(group)
    found = [f"{group.help} {group.epilog}"]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += list_help(command) if isinstance(command, click.Group) else [f"{command.help} {command.epilog}"]
    return found


def test_examples_in_help_exist():
    names = {name for text in list_help(cli) for name in re.findall(rf"{PREFIX}(\w+)", text)}
    assert {"digits_cnn", "digits_test"} <= names <= set(FILES)

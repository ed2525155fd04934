"""The configuration reference matches the code, and its examples use every key."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hil.controller.cli.project.config_files import CONFIG_FILES
from hil.controller.farm.oidc.oidc_settings import load_oidc
from hil.controller.farm.settings import TABLES, load_history, load_settings
from hil.controller.farm.webhooks.webhook_settings import load_webhooks
from hil.controller.pipeline.settings.project import read_project
from hil.controller.projects.config_keys import ConfigTable
from hil.controller.projects.config_schema import make_schema
from hil.core.board_parser import BOARD_TABLES, parse_board
from hil.core.config_files import parse_toml
from hil.core.variables import VARIABLES
from hil.errors import UsageError
from tools.configuration import DOCS, PAGES, SCHEMAS, write_page
from tools.configuration_examples import EXAMPLES

ROOT = DOCS.parent
COMMAND = "run: .venv/bin/python -m tools.configuration"
# Variables of other programs in the source: files that `hil init` writes, and shell completion.
OTHERS = {"HIL_PACKAGE"}
# Macros of the firmware.
OTHERS |= {"HIL_BAUD", "HIL_CLINT", "HIL_PLIC", "HIL_RAM", "HIL_RESET", "HIL_RESET_VALUE", "HIL_TICK_HZ"}
OTHERS |= {"HIL_UART", "HIL_UART_HZ", "HIL_UART_IRQ"}
ALL_EXAMPLES = [(kind, text) for kind, texts in EXAMPLES.items() for text in texts.values()]


@pytest.mark.parametrize("name", PAGES)
def test_page_matches_code(name: str) -> None:
    assert (DOCS / name).read_text() == write_page(name), COMMAND


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schema_matches_code(kind: str) -> None:
    assert (DOCS / SCHEMAS[kind]).read_text() == make_schema(CONFIG_FILES[kind]), COMMAND


def parse(kind: str, text: str, path: Path) -> Any:
    """Parse a config file with the code that commands use."""
    path.write_text(text)
    if kind == "project":
        return read_project(path)
    if kind == "board":
        return parse_board(text, path)
    secrets = {"CI_SECRET": "secret", "CHAT_URL": "https://chat.example.com/hook"}
    return load_settings(path), load_history(path, ""), load_webhooks(path, secrets), load_oidc(path)


@pytest.mark.parametrize(("kind", "text"), ALL_EXAMPLES)
def test_example_is_valid_for_parser_and_schema(kind: str, text: str, tmp_path: Path) -> None:
    parse(kind, text, tmp_path / "config.toml")
    jsonschema.Draft202012Validator(json.loads(make_schema(CONFIG_FILES[kind]))).validate(parse_toml(text, None))


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_use_every_key(kind: str) -> None:
    used = {key for text in EXAMPLES[kind].values() for key in list_keys(parse_toml(text, None))}
    for table in CONFIG_FILES[kind].list_tables():
        names = {one.name for one in table.keys if not table.parent or table.parent == "limits"}
        missing = {name for name in names if not any(fits(table, path) and key == name for path, key in used)}
        assert not missing, f"[{table.name}]"


def list_keys(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        yield path, name
        if isinstance(value, dict):
            yield from list_keys(value, f"{path}.{name}" if path else name)


def fits(table: ConfigTable, path: str) -> bool:
    """Return True if a path is the table's header, with values instead of PATTERN and NAME."""
    pattern = "".join(
        ".+" if re.fullmatch(r'"?[A-Z]+"?', part) else re.escape(part) for part in re.split(r"(\.)", table.name)
    )
    return re.fullmatch(pattern, path) is not None


@pytest.mark.parametrize("kind", EXAMPLES)
def test_unknown_key_is_rejected_with_similar_key(kind: str, tmp_path: Path) -> None:
    schema = jsonschema.Draft202012Validator(json.loads(make_schema(CONFIG_FILES[kind])))
    checked = 0
    for table in CONFIG_FILES[kind].list_tables():
        if table.rest or "PATTERN" in table.name:
            continue
        header = table.name.replace("NAME", "ana")
        typo = f"{table.keys[-1].name}x"
        text = f"[{header}]\n{typo} = 1\n"
        with pytest.raises(UsageError) as caught:
            parse(kind, text, tmp_path / "config.toml")
        assert typo in str(caught.value) and "did you mean" in caught.value.hint, text
        assert not schema.is_valid(parse_toml(text, None))
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("kind", EXAMPLES)
def test_unknown_table_is_rejected_with_similar_table(kind: str, tmp_path: Path) -> None:
    name = CONFIG_FILES[kind].list_tables()[0].name
    with pytest.raises(UsageError, match=rf"unknown table \[{name}x\]") as caught:
        parse(kind, f"[{name}x]\n", tmp_path / "config.toml")
    assert f"did you mean {name!r}?" in caught.value.hint


def test_reference_lists_every_table() -> None:
    assert {one.name for one in CONFIG_FILES["board"].list_tables()} == set(BOARD_TABLES)
    assert {one.name.split(".")[0] for one in CONFIG_FILES["farm"].list_tables()} == set(TABLES)


def test_reference_lists_every_variable() -> None:
    found = set()
    for path in (ROOT / "hil").rglob("*.py"):
        text = path.read_text()
        if "HIL_" in text and path.name != "variables.py":
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {one for one in strings if isinstance(one, str) and re.fullmatch(r"HIL_[A-Z_]+", one)}
    assert found - OTHERS == {one.name for one in VARIABLES}


@pytest.mark.parametrize("path", sorted((ROOT / "board_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_board_configs_of_hil_match_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(json.loads(make_schema(CONFIG_FILES["board"]))).validate(
        parse_toml(path.read_text(), path)
    )

"""Untrusted TOML."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.settings import load_settings
from hil.controller.models.flows.flow_registry import read_flows
from hil.controller.workloads.study.record import LIST, read_study
from hil.controller.workloads.suites.expected import parse
from hil.core.boards import load_board
from hil.core.config_files import parse_toml
from hil.errors import UsageError

READERS = {
    "board": lambda path: load_board(str(path)),
    "terms": load_settings,
    "flows": read_flows,
    "expected": lambda path: parse(path.read_text(), path),
    "study": lambda path: read_study(path.parent),
}


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, "a = " + "9" * 6000, "a = ", "[a"], ids=range(4))
@pytest.mark.parametrize("kind", READERS)
def test_toml_readers_report_path_of_invalid_file(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / (LIST if kind == "study" else "x.toml")
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot be read") as refused:
        READERS[kind](path)
    assert str(path) in refused.value.message


def test_parse_toml_reads_tables() -> None:
    assert parse_toml("[a]\nb = 1", None) == {"a": {"b": 1}}

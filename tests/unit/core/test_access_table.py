"""The table [access] of a board config."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.core.board_config import AccessList
from hil.core.board_parser import parse_board
from hil.errors import UsageError


def test_parser_reads_users_and_groups():
    text = '[access]\nusers = ["anna"]\ngroups = ["vision", "lab"]\n'
    assert parse_board(text, Path("b.toml")).access == AccessList(("anna",), ("vision", "lab"))
    assert parse_board("", Path("b.toml")).access == AccessList()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[access]\nusers = []\n", "no users and no groups"),
        ('[access]\nuser = ["anna"]\n', "user"),
        ('[access]\nusers = "anna"\n', "users"),
        ('[access]\nusers = [""]\n', "invalid name ''"),
        ('[access]\ngroups = ["a\\nb"]\n', "invalid name"),
    ],
)
def test_parser_refuses_invalid_access(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse_board(text, Path("b.toml"))

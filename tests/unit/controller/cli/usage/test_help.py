"""`hil help`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from hil.controller.cli.main import cli
from hil.errors import UsageError


def shown(*words: str) -> str:
    result = CliRunner().invoke(cli, words, prog_name="hil", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("words", [(), ("run",), ("board",), ("board", "check"), ("farm", "token", "add"), ("help",)])
def test_help_prints_same_text_as_option(words):
    assert shown("help", *words) == shown(*words, "--help")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("rnu",), "unknown command `hil rnu`", "did you mean 'run'"),
        (("board", "chek"), "unknown command `hil board chek`", "did you mean 'check'"),
        (("run", "fast"), "`hil run` has no subcommands, got 'fast'", "hil help run"),
    ],
)
def test_help_rejects_unknown_command(words, message, hint):
    with pytest.raises(UsageError) as error:
        CliRunner().invoke(cli, ("help", *words), prog_name="hil", catch_exceptions=False, standalone_mode=False)
    assert error.value.message == message
    assert hint in error.value.hint
    assert error.value.exit_code == 2

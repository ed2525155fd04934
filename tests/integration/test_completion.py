"""Completion of the command line, as the scripts of `hil completion` call it."""

from __future__ import annotations

import pytest


@pytest.mark.daily
@pytest.mark.parametrize(
    ("line", "expected"), [("hil ru", {"run", "runs"}), ("hil run --runtime-hw", {"--runtime-hw-type"})]
)
def test_completion_lists_commands_and_options(hil, environment, line, expected):
    environment.update(_HIL_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(line.split()) - 1))
    ended = hil()
    assert ended.code == 0, ended.err
    assert {text.partition(",")[2] for text in ended.out.split()} == expected

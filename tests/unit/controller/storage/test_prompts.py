"""Test that a prompt shows its text without terminal control sequences."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.terminals import terminal


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("Code\x1b]0;title\x07\x1b[2J: ", rb"Code\x1b]0;title\x07\x1b[2J: "),
        ("key \udcff: ", rb"key \udcff: "),
        ("1. push\n2. Straße: ", "1. push\r\n2. Straße: ".encode()),
    ],
)
def test_prompt_escapes_control_characters(tmp_path: Path, prompt: str, shown: bytes) -> None:
    program = tmp_path / "asking.py"
    program.write_text(f"from hil.controller.storage.screen import prompts\nprint('said', prompts.ask({prompt!a}))\n")
    with terminal(program, cwd=tmp_path, env=os.environ) as asked:
        asked.receive_answer(shown, b"123")
        assert asked.ended() == 0
    assert asked.shown.startswith(shown) and b"said 123" in asked.shown

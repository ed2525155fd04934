"""Agents of one serial line wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hil.agent.board_claim import BoardClaim
from hil.agent.server import AgentConfig
from hil.core.board_parser import parse_board
from hil.mcu import __main__ as program


def test_agents_of_one_line_share_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AgentConfig] = []
    monkeypatch.setattr(program, "Agent", made.append)
    device, link = tmp_path / "tty", tmp_path / "by-id"
    device.touch()
    link.symlink_to(device)
    board = parse_board('[mcu]\nchip = "mps2-an386"\n', Path("/m4.toml"))
    options: dict[str, Any] = {"listen": "unix:/x", "store": tmp_path}
    for path in (device, link, tmp_path / "other"):
        program.start(options, board, f"serial:{path}")
    assert all(one.claim_board for one in made)
    first, second, other = (BoardClaim(one.claim_name) for one in made)
    try:
        assert first.take("ann", "hil run")
        assert not second.take("bob", "hil run")
        holder = second.find_other_holder()
        assert holder is not None
        assert holder.owner.startswith("ann, logged in as ")
        assert other.take("bob", "hil run")
    finally:
        first.release()
        other.release()

"""`hil flows`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.flows import flows as command
from hil.controller.models.flows.flow_registry import load_flows


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_command_lists_every_flow_with_description():
    shown = CliRunner().invoke(command, []).output.splitlines()
    assert [line.split()[0] for line in shown] == list(load_flows())
    assert shown[1].endswith("IREE, highest optimization level")


def test_command_lists_flows_of_file_as_json(tmp_path: Path):
    (tmp_path / "my.toml").write_text('[mine]\nruntime = "iree"\nrecipe = "float16"\natol = 0.5\n')
    document = json.loads(CliRunner().invoke(command, ["my.toml", "--json"]).output)
    assert document["schema"] == 1
    (flow,) = document["flows"]
    assert (flow["name"], flow["runtime"], flow["recipe"], flow["atol"]) == ("mine", "iree", "float16", 0.5)

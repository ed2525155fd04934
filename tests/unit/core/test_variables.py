"""Environment variables with a list of values, or with a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.main import cli
from hil.controller.devices.links.simulator import open_simulator
from hil.controller.farm.host.inventory import HostInfo, make_simulators
from hil.controller.farm.paths import FarmAddress
from hil.controller.projects.doctor import checks
from hil.core.boards import load_board
from hil.core.variables import VARIABLES, check_variables, read_choice, read_count
from hil.errors import UsageError


@pytest.mark.parametrize(("value", "expected"), [("", "auto"), ("auto", "auto"), ("required", "required")])
def test_choice_is_value_or_default(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_SANDBOX", value)
    assert read_choice("HIL_SANDBOX") == expected


@pytest.mark.parametrize("value", ["requred", "REQUIRED", " required"])
def test_misspelled_choice_has_hint(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_SANDBOX", value)
    with pytest.raises(UsageError, match=f"invalid HIL_SANDBOX='{value}'") as caught:
        read_choice("HIL_SANDBOX")
    assert caught.value.hint == "did you mean 'required'? expected one of auto, required, off"


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²", "9" * 5000])
def test_invalid_count_is_usage_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_PICTURES", value)
    with pytest.raises(UsageError, match="invalid HIL_PICTURES="):
        read_count("HIL_PICTURES")
    monkeypatch.delenv("HIL_PICTURES")
    assert read_count("HIL_PICTURES") == 20


@pytest.mark.parametrize("name", [one.name for one in VARIABLES if one.values or one.is_number])
def test_commands_report_invalid_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "frsh")
    with pytest.raises(UsageError, match=name):
        check_variables()
    (found,) = checks._check_variables()
    assert (found.state, found.found) == ("fail", f"invalid {name}='frsh'") and found.fix.startswith(
        ("did", "expected")
    )
    error = CliRunner().invoke(cli, ["config", "show"]).exception
    assert isinstance(error, UsageError) and error.message == f"invalid {name}='frsh'"


def test_simulators_check_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_SIMULATOR", "frsh")
    with pytest.raises(UsageError, match="HIL_SIMULATOR") as caught:
        open_simulator(load_board("sim").config)
    assert "did you mean 'fresh'?" in caught.value.hint
    monkeypatch.setenv("HIL_SANDBOX", "of")
    place = HostInfo("lab", "", FarmAddress(("unix:x",), ""), tmp_path, tmp_path)
    with pytest.raises(UsageError, match="HIL_SANDBOX"):
        make_simulators(place, 1, ())

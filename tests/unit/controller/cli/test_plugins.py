"""`hil new-plugin` and `hil plugin check` without processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hil.controller.cli.board.maintenance import deploy
from hil.controller.cli.plugins.new_plugin import _KINDS, new_plugin
from hil.controller.cli.plugins.plugin import _iter_lines
from hil.controller.records.commands.plugins import PluginReport, PluginViolation, SkippedCheck
from hil.controller.workloads.plugin_template import KINDS, rename
from hil.core.config_files import parse_toml
from hil.errors import UsageError


def create(*words: object) -> str:
    return CliRunner().invoke(new_plugin, [*map(str, words)], standalone_mode=False, catch_exceptions=False).output


def test_new_plugin_offers_all_kinds():
    assert tuple(KINDS) == _KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_new_plugin_registers_only_parts_that_exist(kind: str, tmp_path: Path):
    document = json.loads(create("acme", "--kind", kind, "-o", tmp_path / "new", "--json"))
    assert sorted(document["files"]) == sorted(str(path) for path in (tmp_path / "new").rglob("*") if path.is_file())
    project = parse_toml((tmp_path / "new" / "pyproject.toml").read_text(), None)
    points = project["project"]["entry-points"]
    assert ("hil.links" in points) is (kind == "board")
    assert ("hil.references" in points) is (kind == "reference")
    for value in (one for named in points.values() for one in named.values()):
        module = tmp_path / "new" / value.partition(":")[0].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
    for package in project["tool"]["setuptools"].get("packages", ()):
        assert (tmp_path / "new" / package.replace(".", "/") / "__init__.py").is_file()


def test_rename_covers_all_forms():
    assert rename("hil-npx hil_npx NpxRuntime NPX npx: --npx-lanes", "npx", "my-chip") == (
        "hil-my-chip hil_my_chip MyChipRuntime MY-CHIP my-chip: --my-chip-lanes"
    )
    assert rename("hil-plain-ort hil_plain_ort:reference", "plain-ort", "acme") == "hil-acme hil_acme:reference"


@pytest.mark.parametrize("name", ["Acme", "a_b", "1a", "a-", "", "iree", "sim", "ssh", "torch-eager", "../x"])
def test_new_plugin_refuses_invalid_name(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match=f"invalid plugin name '{name}'"):
        create(name, "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_new_plugin_keeps_existing_files(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="exists and is not an empty directory"):
        create("acme", "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_report_shows_few_violations_of_a_rule():
    def violate(rule: str, found: str) -> PluginViolation:
        return PluginViolation(entry_point="hil.runtimes a", rule=rule, found=found, expected="E", documentation="D")

    report = PluginReport(
        package="hil-a",
        version="1",
        checks=9,
        entry_points=["hil.runtimes a"],
        operators=["Add", "Relu"],
        violations=[*(violate("values", f"model {number}") for number in range(5)), violate("leak", "files")],
        skipped=[SkippedCheck(entry_point="hil.compilers a", what="model int8", why="no int8")],
        exit_code=1,
    )
    assert list(_iter_lines(report)) == [
        "VIOLATION  values  hil.runtimes a",
        *(f"  found     model {number}" for number in range(3)),
        "            and 2 more (--json)",
        "  expected  E",
        "  see       D",
        "VIOLATION  leak  hil.runtimes a",
        "  found     files",
        "  expected  E",
        "  see       D",
        "skipped    hil.compilers a, model int8: no int8",
        "hil-a 1: 9 checks, 6 violations; operators tried: Add, Relu; not checked: model int8 of hil.compilers a",
    ]


def test_deploy_refuses_unknown_runtime():
    with pytest.raises(UsageError, match="invalid --runtime 'ire'") as raised:
        CliRunner().invoke(deploy, ["rpi5", "--runtime", "ire"], standalone_mode=False, catch_exceptions=False)
    assert "did you mean 'iree'?" in raised.value.hint and "--package" in raised.value.hint

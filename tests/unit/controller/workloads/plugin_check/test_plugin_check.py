"""`hil plugin check` finds planted violations, and accepts the example package."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import zipfile
from pathlib import Path

import pytest
from support.npx import EXAMPLE, REFERENCE
from support.pip import install
from support.planted import COMPILER, CRASH, HANG, PLANTED, TARGET, plant

from hil.controller.records.commands.plugins import PluginReport
from hil.controller.workloads.plugin_check.packages import open_package, read_folder
from hil.controller.workloads.plugin_check.rules import RULES
from hil.controller.workloads.plugin_check.suite import check_package
from hil.errors import UsageError

pytestmark = pytest.mark.ci

PAGE = Path(__file__).parents[5] / "docs" / "plugin-contract.md"


def check(site: Path, folder: Path, timeout_s: float = 60.0) -> PluginReport:
    folder.mkdir()
    return check_package(read_folder(site), folder, timeout_s=timeout_s, say=lambda text: None)


def test_check_accepts_example(tmp_path: Path):
    (tmp_path / "site").mkdir()
    install(EXAMPLE, tmp_path / "site")
    report = check(tmp_path / "site", tmp_path / "work")
    assert [(one.rule, one.found) for one in report.violations] == []
    assert report.exit_code == 0 and report.checks > 15
    assert [f"{one.entry_point} {one.what}" for one in report.skipped] == ["hil.links npx calls"]
    assert report.operators == ["Add", "Not", "Relu"]
    assert report.entry_points[-1] == "hil.targets npx"


@pytest.mark.parametrize(("offset", "value"), [(8, b"\x01"), (10, b"\x08"), (10, b"\x63")])
def test_example_refuses_damaged_program(offset: int, value: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("npx_program", EXAMPLE / "hil_npx" / "program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "npx_program", module)
    spec.loader.exec_module(module)
    file = tmp_path / module.FILE
    module.write_program(module.NpxProgram([], [], [], {}, 4), file)
    assert module.read_program(file).lanes == 4
    content = bytearray(file.read_bytes())
    # Flags and compression method of the first entry.
    start = content.index(b"PK\x01\x02") + offset
    content[start : start + 1] = value
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a program of NPX"):
        module.read_program(file)


def test_check_finds_each_planted_violation(tmp_path: Path):
    site = plant(tmp_path, *itertools.chain.from_iterable(PLANTED.values()))
    report = check(site, tmp_path / "work")
    assert len(PLANTED) >= 10
    assert {one.rule for one in report.violations} == set(PLANTED), [(v.rule, v.found) for v in report.violations]
    assert report.exit_code == 1
    found = {one.rule: one for one in report.violations}
    assert "hil.targets" in found["group"].found and found["group"].entry_point == "hil.target npx"
    assert "unknown operator raises ValueError" in found["compile-error"].found
    assert found["outputs"].found == "model int8: fetch() returned (6,) int16, expected (6,) int8"
    assert found["load-error"].documentation == "docs/plugin-contract.md#runtimes"


def test_check_finds_wrong_reference(tmp_path: Path):
    changes = [
        (
            "hil_plain_ort.py",
            "save_tensors(Path(outputs), dict(",
            "values[0] = values[0] - True\n    save_tensors(Path(outputs), dict(",
        ),
        ("hil_plain_ort.py", 'return f"onnxruntime', 'import time\n\n    return f"{time.time_ns()} onnxruntime'),
    ]
    report = check(plant(tmp_path / "wrong", *changes, example=REFERENCE), tmp_path / "work")
    assert {one.rule for one in report.violations} == {"source", "reference"}
    assert "model bool: unexpected TypeError" in [one.found[:32] for one in report.violations]
    assert "model float32: output out is wrong at [" in report.violations[1].found
    report = check(plant(tmp_path / "right", example=REFERENCE), tmp_path / "again")
    assert report.violations == [] and [one.what for one in report.skipped] == []
    assert report.operators == ["Add", "Not", "Relu"]


def test_check_survives_crash_and_reports_target(tmp_path: Path):
    report = check(plant(tmp_path, CRASH, TARGET), tmp_path / "work")
    rules = [one.rule for one in report.violations]
    assert set(rules) == {"crash", "target"}
    assert "check program (model float32): the worker process died of SIGABRT" in report.violations[0].found
    assert "architecture unknown: KeyError" in report.violations[-1].found


def test_check_names_missing_model_digest(tmp_path: Path):
    report = check(plant(tmp_path, (COMPILER, '"model": model.digest, ', "")), tmp_path / "work")
    assert {one.rule for one in report.violations} == {"cache-key"}
    assert report.violations[0].found == "the models float32 and two-outputs have the same key"


@pytest.mark.slow
def test_check_ends_hanging_run(tmp_path: Path):
    report = check(plant(tmp_path, HANG), tmp_path / "work", timeout_s=15.0)
    assert [(one.rule, one.found) for one in report.violations] == [
        ("timeout", "check program (model float32) timed out after 15 s")
    ]


def test_open_package_builds_project_and_leaves_it_unchanged(tmp_path: Path):
    before = sorted(EXAMPLE.iterdir())
    package = open_package(str(EXAMPLE), tmp_path)
    assert (package.name, package.version, package.folders) == ("hil-npx", "0.1.0", (str(tmp_path / "site"),))
    assert "hil.board_configs npx" in [point.text for point in package.points]
    assert (tmp_path / "site" / "hil_npx" / "boards" / "npx-kit.toml").is_file()
    assert sorted(EXAMPLE.iterdir()) == before


def test_open_package_refuses_invalid_wheel(tmp_path: Path):
    wheel = tmp_path / "acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("acme.py", "VERSION = 1\n" * 100)
    with pytest.raises(UsageError, match="METADATA not found"):
        open_package(str(wheel), tmp_path / "new")
    content = bytearray(wheel.read_bytes())
    content[37:43] = b"\xff" * 6  # the start of the compressed data
    wheel.write_bytes(content)
    with pytest.raises(UsageError, match="is not a valid wheel"):
        open_package(str(wheel), tmp_path / "damaged")


def test_open_package_refuses_other_sources(tmp_path: Path):
    with pytest.raises(UsageError, match="package 'nonesuch' not found"):
        open_package("nonesuch", tmp_path)
    with pytest.raises(UsageError, match="has no entry points for hil"):
        open_package("numpy", tmp_path)


def test_contract_page_lists_rules():
    text = PAGE.read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text, re.M))
    assert rows == {name: rule.expected for name, rule in RULES.items()}
    headings = re.findall(r"^## (.*)$", text, re.M)
    for name, rule in RULES.items():
        assert rule.section in [heading.lower().replace(" ", "-") for heading in headings], name

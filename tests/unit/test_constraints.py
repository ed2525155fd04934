"""constraints.txt, checked without a package index; scripts/check-constraints asks pip."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.lstrip().startswith("#")
]
PLACES = [
    {"python_version": version, "python_full_version": f"{version}.1", "sys_platform": system, "platform_machine": arch}
    for version in ("3.10", "3.11", "3.12", "3.13")
    for system, arch in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
]
SUPPORTED = SpecifierSet(PROJECT["requires-python"])


def holds(requirement: Requirement, place: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "", **place})


def version_of(pin: Requirement) -> str:
    (only,) = pin.specifier
    assert only.operator == "==", f"{pin} is no pin"
    return only.version


def test_constraint_places_cover_supported_pythons():
    pythons = {place["python_version"] for place in PLACES}
    assert pythons == {version for version in (f"3.{minor}" for minor in range(30)) if version in SUPPORTED}


def test_constraints_pin_packages_without_duplicates():
    for place in PLACES:
        names = [canonicalize_name(pin.name) for pin in PINS if holds(pin, place)]
        assert sorted(names) == sorted(set(names)), place


def test_constraints_pin_every_requirement_of_extras():
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for lines in (PROJECT["dependencies"], *extras.values()) for line in lines]
    for place in PLACES:
        pinned = {canonicalize_name(pin.name): version_of(pin) for pin in PINS if holds(pin, place)}
        for one in wanted:
            if one.name != "hil" and holds(one, place):
                assert pinned[canonicalize_name(one.name)] in one.specifier, (str(one), place)


def test_constraints_respect_python_limits_of_releases():
    """Only for packages installed here: the index covers the rest."""
    limits = {(canonicalize_name(d.name), d.version): d.metadata["Requires-Python"] for d in distributions()}
    checked = 0
    for pin in PINS:
        limit = limits.get((canonicalize_name(pin.name), version_of(pin)))
        if limit:
            checked += 1
            for place in PLACES:
                if holds(pin, place):
                    assert place["python_full_version"] in SpecifierSet(limit), f"{pin} is for Python {limit}"
    assert checked > 50


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_constraints", ROOT / "scripts" / "check_constraints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_check_constraints_covers_every_extra_and_python(script, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(script, "find_python", lambda version: f"/python{version}")
    monkeypatch.setattr(script, "check", lambda *one: (asked.append(one) or True, "3 packages"))
    assert script.main() == 0
    pythons = sorted({place["python_version"] for place in PLACES})
    assert sorted(asked) == sorted(
        (f"/python{one}", extra) for one in pythons for extra in PROJECT["optional-dependencies"]
    )
    assert len(capsys.readouterr().out.splitlines()) == len(asked)


def test_check_constraints_fails_if_unchecked_or_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_python", lambda version: None if version == "3.12" else "/python")
    monkeypatch.setattr(script, "check", lambda *_: (True, "3 packages"))
    assert script.main() == 1
    assert "3.12  NOT CHECKED" in capsys.readouterr().out
    monkeypatch.setattr(script, "find_python", lambda _: "/python")
    monkeypatch.setattr(script, "check", lambda _, extra: (extra != "tflite", "ERROR: no such thing"))
    assert script.main() == 1
    assert len(re.findall(r"tflite +FAILED\nERROR: no such thing", capsys.readouterr().out)) == 4

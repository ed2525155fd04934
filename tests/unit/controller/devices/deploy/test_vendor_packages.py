"""Packages for `hil board deploy --package`: requirements, platforms, and packages that stay on the board."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from support.deploying import empty_index, put

from hil.controller.devices.deploy import ensure, probe, vendor_packages
from hil.controller.devices.deploy.ensure import AgentRecipe
from hil.controller.devices.deploy.packages import Interpreter, NoWheels
from hil.controller.devices.deploy.vendor_packages import VendorPackage, build_wheel, prepare_packages
from hil.errors import UsageError

ARM = Interpreter("/usr/bin/python3.11", (3, 11), "aarch64", "glibc-2.31")


def save_wheel(
    folder: Path,
    name: str = "hil_acme",
    version: str = "1.0",
    tags: str = "py3-none-any",
    requires: str = "",
    points="acme",
) -> Path:
    """Save a wheel with a runtime."""
    path = folder / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags}\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(f"{info}/entry_points.txt", f"[hil.runtimes]\n{points} = {name}:Runtime\n" if points else "")
    return path


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., tuple[VendorPackage, ...]]:
    def make(*sources: Path) -> tuple[VendorPackage, ...]:
        folder = tmp_path / f"prepared-{len(list(tmp_path.iterdir()))}"
        return prepare_packages([str(source) for source in sources], folder, (), lambda: ARM)

    return make


def test_wheel_gives_runtimes_and_digest(tmp_path: Path, prepare):
    (found,) = prepare(save_wheel(tmp_path))
    assert found.runtimes == ("acme",)
    assert found.package.title == "hil-acme 1.0"
    assert found.marker == f"+hil-acme={found.package.id}"
    (other,) = prepare(save_wheel(tmp_path, version="1.1"))
    assert other.package.id != found.package.id


@pytest.mark.parametrize(
    ("tags", "fits"),
    [
        ("py3-none-any", True),
        ("cp311-cp311-manylinux_2_17_aarch64.manylinux2014_aarch64", True),
        ("cp38-abi3-linux_aarch64", True),
        ("cp310-cp310-linux_aarch64", False),
        ("cp312-abi3-linux_aarch64", False),
        ("cp311-cp311-manylinux_2_34_aarch64", False),
        ("py3-none-linux_x86_64", False),
    ],
)
def test_wheel_must_fit_board(tmp_path: Path, prepare, tags: str, fits: bool):
    (found,) = prepare(save_wheel(tmp_path, tags=tags))
    if fits:
        found.check_platform(ARM)
        return
    with pytest.raises(NoWheels, match=r"the wheel of hil-acme 1\.0 is for .*, the board has Python 3\.11 on aarch64"):
        found.check_platform(ARM)


def test_requirement_must_be_deployed_too(tmp_path: Path, prepare):
    requires = (
        "Requires-Dist: hil\nRequires-Dist: NumPy>=2\nRequires-Dist: acme_driver>=3\nRequires-Dist: x ; extra == 'y'\n"
    )
    wheel = save_wheel(tmp_path, requires=requires)
    with pytest.raises(UsageError, match=r"hil-acme 1\.0 needs acme-driver, which the agent does not have"):
        prepare(wheel)
    driver = save_wheel(tmp_path, "acme_driver", points="")
    assert [one.name for one in prepare(wheel, driver)] == ["hil-acme", "acme-driver"]


def test_invalid_sources_are_refused(tmp_path: Path, prepare):
    with pytest.raises(UsageError, match="registers no runtime for hil"):
        prepare(save_wheel(tmp_path, points=""))
    with pytest.raises(UsageError, match="project directory or wheel not found"):
        prepare(tmp_path / "missing")
    (tmp_path / "bad-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(UsageError, match="not a valid wheel"):
        prepare(tmp_path / "bad-1.0-py3-none-any.whl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"pyproject\.toml not found"):
        prepare(tmp_path / "empty")


@pytest.mark.parametrize("requirement", ["-", "acme driver", "acme>=>3"])
def test_wheel_with_invalid_requirement_is_refused(tmp_path: Path, prepare, requirement: str):
    with pytest.raises(UsageError, match="not a valid wheel"):
        prepare(save_wheel(tmp_path, requires=f"Requires-Dist: {requirement}\n"))


def test_damaged_wheel_is_refused(tmp_path: Path, prepare):
    wheel = save_wheel(tmp_path)
    content = wheel.read_bytes().replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    wheel.write_bytes(content)
    with pytest.raises(UsageError, match=r"not a valid wheel: .* encrypted"):
        prepare(wheel)
    with zipfile.ZipFile(save_wheel(tmp_path), "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.txt", "text " * 100)
        start = file.getinfo("data.txt").header_offset + len("data.txt") + 30
    content = bytearray(wheel.read_bytes())
    content[start : start + 6] = b"\xff" * 6
    wheel.write_bytes(content)
    with pytest.raises(UsageError, match=r"not a valid wheel: .* decompressing"):
        prepare(wheel)


def test_name_with_dot_satisfies_requirement(tmp_path: Path, prepare):
    wheel = save_wheel(tmp_path, requires="Requires-Dist: acme.driver\n")
    driver = save_wheel(tmp_path, "acme.driver", points="")
    assert [one.name for one in prepare(wheel, driver)] == ["hil-acme", "acme-driver"]


def test_project_with_special_files_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project, folder = tmp_path / "acme", tmp_path / "build"
    project.mkdir()
    folder.mkdir()
    (project / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    (project / "missing").symlink_to("nowhere")
    (project / "linked.toml").symlink_to("pyproject.toml")
    os.mkfifo(project / "pipe")
    monkeypatch.setattr("hil.controller.devices.deploy.vendor_packages.call_pip", lambda *_: (1, "no network"))
    with pytest.raises(UsageError, match="pip could not build a wheel"):
        build_wheel(project, folder)
    assert sorted(one.name for one in (folder / "source").iterdir()) == ["linked.toml", "pyproject.toml"]
    with pytest.raises(UsageError, match=r"cannot copy .*acme: .*File exists"):
        build_wheel(project, folder)


@pytest.mark.parametrize(
    ("requires", "installed", "is_isolated"),
    [
        ('["setuptools>=77"]', {"setuptools": "84.2.1"}, False),
        ('["setuptools>=77"]', {"setuptools": "65.5.0", "wheel": "0.45"}, True),
        ('["setuptools"]', {"setuptools": "65.5.0"}, True),
        ('["setuptools"]', {"setuptools": "65.5.0", "wheel": "0.45"}, False),
        ('["setuptools", "tomli; python_version < \'3\'"]', {"setuptools": "84.2.1"}, False),
        ('["Flit_Core<4"]', {"flit-core": "3.9"}, False),
        ('["setuptools", "acme-build"]', {"setuptools": "84.2.1"}, True),
        ('["setuptools @ file:///x.whl"]', {"setuptools": "84.2.1"}, True),
        ('["setuptools>>1"]', {"setuptools": "84.2.1"}, True),
    ],
)
def test_wheel_is_built_with_installed_tools_only_if_they_fit(
    requires: str, installed: dict[str, str], is_isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commands: list[list[str]] = []

    def find_version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vendor_packages, "get_version", find_version)
    monkeypatch.setattr(vendor_packages, "call_pip", lambda command, _: (commands.append(command), (1, "failed"))[1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hil-acme").mkdir()
    (tmp_path / "hil-acme" / "pyproject.toml").write_text(f"[build-system]\nrequires = {requires}\n")
    with pytest.raises(UsageError, match="pip could not build") as raised:
        build_wheel(Path("hil-acme"), tmp_path)
    assert ("--no-build-isolation" not in commands[0]) is is_isolated
    assert raised.value.hint.endswith("pip wheel --no-deps ./hil-acme")


@pytest.mark.ci
def test_published_package_is_fetched_for_board(tmp_path: Path, prepare, monkeypatch: pytest.MonkeyPatch):
    empty_index(tmp_path, monkeypatch)
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    save_wheel(index, tags="cp311-cp311-manylinux_2_17_aarch64")
    save_wheel(index, version="1.5", tags="cp311-cp311-manylinux_2_17_x86_64")
    (found,) = prepare("hil-acme")
    assert found.package.title == "hil-acme 1.0"
    with pytest.raises(NoWheels, match=r"pip found no wheel of hil-acme==1\.5 for Python 3\.11 on aarch64"):
        prepare("hil-acme==1.5")


@pytest.mark.ci
def test_package_survives_new_agent_until_new_version(shell: Any, small: Callable[..., AgentRecipe], tmp_path, prepare):
    (first,) = prepare(save_wheel(tmp_path))
    (second,) = prepare(save_wheel(tmp_path, version="2.0"))

    def deploy(text: str, *vendors: VendorPackage) -> tuple[str, ...]:
        recipe = small(text)
        put(shell, AgentRecipe(recipe.files, recipe.agent, (), vendors))
        agent = probe.read_status(shell, "").agent
        assert [one for one in agent.runtimes if one.startswith("+")]
        return agent.packages

    assert first.package.id in deploy("old hil", first)
    assert first.package.id in deploy("new hil")
    packages = deploy("new hil", second)
    assert second.package.id in packages and first.package.id not in packages


@pytest.mark.parametrize(("marker", "python"), [("+hil-acme=id", "/usr/bin/old"), ("iree=3.1.0", "/usr/bin/best")])
def test_new_agent_keeps_python_of_kept_package(
    marker: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ensure, "fetch_packages", lambda *_, **__: [])
    best = replace(ARM, path="/usr/bin/best", version=sys.version_info[:2])
    old = replace(ARM, path="/usr/bin/old", version=(3, 10))
    installed = probe.AgentBuild("build", "recipe", (marker,), old.path, ("id",))
    seen = probe.Seen(system="Linux", interpreters=(best, old), installed=installed, packages=frozenset({"id"}))
    agent, _ = ensure._plan(seen, AgentRecipe.of(()), tmp_path, print)
    assert agent.python == python

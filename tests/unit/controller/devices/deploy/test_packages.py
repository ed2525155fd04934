"""Packages are reproducible and contain only files that an agent needs."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from hil.controller.devices.deploy.packages import (
    File,
    archive_files,
    iter_wheel_files,
    own_files,
    read_index,
    write_package,
    write_wheels,
)


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        for name in names:
            target.writestr(name, name)
    return path


def test_equal_files_make_equal_packages(tmp_path: Path):
    files = {"b/c.py": File.of(b"c"), "a.so": File.of(b"a" * 5000, executable=True)}
    turned = dict(reversed(files.items()))
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()

    one = write_package("some 1.0", files, tmp_path / "1")
    other = write_package("some 1.0", turned, tmp_path / "2")

    assert (one.id, one.sha256, one.size) == (other.id, other.sha256, other.size)
    assert one.path.read_bytes() == other.path.read_bytes()
    assert one.id.startswith("some-1.0-")
    assert one.disk_bytes >= 4096 + 8192


@pytest.mark.parametrize("changed", [File.of(b"other"), File.of(b"c", executable=True)])
def test_changed_file_changes_package_id(tmp_path: Path, changed: File):
    one = write_package("some 1.0", {"c.py": File.of(b"c")}, tmp_path)
    other = write_package("some 1.0", {"c.py": changed}, tmp_path)

    assert one.id != other.id


def test_package_has_private_modes_and_neutral_owner(tmp_path: Path):
    package = write_package("some 1.0", {"a.py": File.of(b"a"), "tool": File.of(b"t", executable=True)}, tmp_path)

    with tarfile.open(package.path) as archive:
        members = {member.name: member for member in archive}
    assert {name: member.mode for name, member in members.items()} == {"a.py": 0o600, "tool": 0o700}
    for member in members.values():
        assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 0)


def test_wheel_files_drop_unneeded_numpy_files(tmp_path: Path):
    numpy = wheel(
        tmp_path / "numpy-2.4.6-cp311-cp311-manylinux_2_28_aarch64.whl",
        "numpy/__init__.py",
        "numpy/_core/_multiarray_umath.so",
        "numpy/_core/tests/test_x.py",
        "numpy/_core/include/numpy/x.h",
        "numpy/testing/__init__.py",
        "numpy.libs/libopenblas.so",
        "numpy-2.4.6.dist-info/METADATA",
        "numpy-2.4.6.data/scripts/f2py",
        "numpy-2.4.6.data/platlib/numpy/late.py",
    )

    assert {name for name, _ in iter_wheel_files(numpy)} == {
        "numpy/__init__.py",
        "numpy/_core/_multiarray_umath.so",
        "numpy/testing/__init__.py",
        "numpy.libs/libopenblas.so",
        "numpy-2.4.6.dist-info/METADATA",
        "numpy/late.py",
    }


def test_wheel_files_keep_tests_of_other_wheels(tmp_path: Path):
    vendors = wheel(tmp_path / "vendor_runtime-1.0-py3-none-any.whl", "vendor/tests/data.py")

    assert [name for name, _ in iter_wheel_files(vendors)] == ["vendor/tests/data.py"]


def test_index_lists_packed_wheels(tmp_path: Path):
    source = wheel(tmp_path / "vendor_runtime-1.0-py3-none-any.whl", "vendor/__init__.py")

    write_wheels([source], tmp_path)

    (package,) = read_index(tmp_path)
    assert package.title == "vendor-runtime 1.0"
    assert package.size == package.path.stat().st_size


def test_agent_files_exclude_controller_files():
    names = set(own_files())

    assert {"hil/agent/__main__.py", "hil/protocol/wire.py", "hil/protocol/v1/agent_pb2.py", "hil/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("hil/controller", "hil/sim", "hil/testing", "hil/api"))]
    assert len(archive_files(own_files())) < 1_100_000

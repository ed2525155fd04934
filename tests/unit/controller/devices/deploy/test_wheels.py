"""Fetch wheels for a board with pip from a local directory."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.deploying import empty_index

from hil.controller.devices.deploy import packages
from hil.controller.devices.deploy.packages import Interpreter, NoAgentHere, NoWheels, Package
from hil.controller.devices.deploy.wheels import (
    WheelGroup,
    WheelRequirement,
    fetch_packages,
    make_agent_group,
    make_runtime_group,
)
from hil.controller.storage.cache import Cache
from hil.errors import BoardError, StorageError

pytestmark = pytest.mark.ci

ARM = Interpreter("/usr/bin/python3.11", (3, 11), "aarch64", "glibc-2.31")
Fetch = Callable[..., list[Package]]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that pip searches; the package index is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    empty_index(tmp_path, monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    def make(wanted: WheelRequirement, interpreter: Interpreter = ARM) -> list[Package]:
        groups = [WheelGroup("some", (wanted,))]
        return fetch_packages(interpreter, groups, say=lambda text: None, cache=Cache(tmp_path / "cache"))

    return make


def publish(index: Path, name: str, version: str, tags: str = "py3-none-any") -> Path:
    path = index / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"tags = {tags!r}")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def titles(packages: list[Package]) -> list[str]:
    return [package.title for package in packages]


def test_packages_prefer_local_version(index: Path, fetch: Fetch):
    for version in ("1.4", "1.5", "1.6"):
        publish(index, "thing", version)

    assert titles(fetch(WheelRequirement("thing", ">=1,<2", "1.5"))) == ["thing 1.5"]


def test_packages_fall_back_to_newest_compatible_version(index: Path, fetch: Fetch):
    publish(index, "thing", "1.4")
    publish(index, "thing", "1.5", "cp311-cp311-manylinux_2_17_aarch64")
    publish(index, "thing", "1.6", "cp311-cp311-manylinux_2_28_x86_64")
    publish(index, "thing", "1.7", "cp312-cp312-manylinux_2_28_aarch64")
    publish(index, "thing", "1.8", "cp311-cp311-manylinux_2_34_aarch64")
    publish(index, "thing", "2.0")

    assert titles(fetch(WheelRequirement("thing", ">=1,<2", "1.9"))) == ["thing 1.5"]


def test_pinned_runtime_requires_local_version(index: Path, fetch: Fetch):
    publish(index, "iree_base_runtime", "3.12.0")

    with pytest.raises(NoWheels, match=r"iree-base-runtime==3\.13\.0") as caught:
        fetch(WheelRequirement("iree-base-runtime", ">=3.10", "3.13.0", pinned=True))

    assert isinstance(caught.value, NoAgentHere)
    assert 'runtime.kind = "command"' in caught.value.hint
    assert "aarch64, glibc 2.31" in caught.value.message


def test_unknown_libc_raises_wheels_error(index: Path, fetch: Fetch):
    with pytest.raises(NoWheels, match=r"Python 3\.11 on riscv64"):
        fetch(WheelRequirement("thing", "", "1.0"), Interpreter("/usr/bin/python3", (3, 11), "riscv64", ""))


def test_packages_are_cached(index: Path, fetch: Fetch):
    wheel = publish(index, "thing", "1.5")
    first = fetch(WheelRequirement("thing", "", "1.5"))
    wheel.unlink()

    assert fetch(WheelRequirement("thing", "", "1.5")) == first
    with pytest.raises(NoWheels):
        fetch(WheelRequirement("thing", "", "1.5"), Interpreter("/usr/bin/python3", (3, 12), "aarch64", "glibc-2.31"))


@pytest.mark.parametrize("runtime", ["executorch", "tflite"])
def test_unpublished_runtime_error_names_runtime(index: Path, tmp_path: Path, runtime: str):
    board = Interpreter("/usr/bin/python3", (3, 11), "armv7l", "glibc-2.36")

    with pytest.raises(NoWheels, match=r"^[a-z-]+[<>=][^ ]+ is not published for Python 3\.11 on armv7l, glibc 2\.36"):
        fetch_packages(board, [make_runtime_group(runtime)], say=print, cache=Cache(tmp_path / "cache"))


def test_slow_download_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = tmp_path / "served"
    served.mkdir()
    wheel = publish(served, "large", "1.0")
    with zipfile.ZipFile(wheel, "a") as more:
        more.writestr("large/data", os.urandom(2_000_000))
    monkeypatch.setattr(packages, "_EVERY_SECONDS", 0.0)
    said: list[str] = []
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(served))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
        group = [WheelGroup("some", (WheelRequirement("large", "", "1.0"),))]
        fetch_packages(ARM, group, say=said.append, cache=Cache(tmp_path / "cache"))
        server.shutdown()

    assert said[0] == "fetching some for Python 3.11 on aarch64, glibc 2.31"
    assert said[-1] == f"{said[0]}: 2.0 MB of 2.0 MB"


def test_full_local_disk_raises_storage_error(index: Path, fetch: Fetch, tmp_path: Path):
    # Make pip fail as on a full disk when it writes a download.
    publish(index, "thing", "1.5")
    full = tmp_path / "full"
    full.mkdir()
    (full / "sitecustomize.py").write_text(
        "import errno, shutil\n"
        "def full(*_, **__): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "shutil.copy = shutil.copy2 = shutil.copyfile = full\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(full))
        with pytest.raises(StorageError, match=r"not enough disk space in .* for the board's packages"):
            fetch(WheelRequirement("thing", "", "1.5"))


def test_unreachable_index_raises_board_error(index: Path, fetch: Fetch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")

    with pytest.raises(BoardError, match="could not fetch") as caught:
        fetch(WheelRequirement("thing", "", "1.5"))

    assert not isinstance(caught.value, NoAgentHere)
    assert "index" in caught.value.hint and caught.value.detail


def test_missing_index_error_does_not_claim_unpublished(index: Path, fetch: Fetch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    publish(index, "thing", "1.4")

    assert titles(fetch(WheelRequirement("thing", ">=1,<2", "1.5"))) == ["thing 1.4"]
    with pytest.raises(BoardError, match=r"other>=1 for Python 3\.11 on aarch64, glibc 2\.31 is not cached") as caught:
        fetch(WheelRequirement("other", ">=1", "1.5"))

    assert not isinstance(caught.value, NoAgentHere), "a board that is served without an agent, for want of an index"
    assert "published" not in caught.value.message
    assert "PIP_NO_INDEX" in caught.value.hint and 'kind = "command"' in caught.value.hint


@pytest.mark.parametrize(("status", "kind"), [(403, BoardError), (404, NoWheels)])
def test_refused_index_request_raises_board_error(
    index: Path, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[BoardError]
):
    class Refusing(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        with pytest.raises(BoardError) as caught:
            fetch(WheelRequirement("thing", "", "1.5"))
        server.shutdown()

    assert type(caught.value) is kind


def test_agent_group_lists_declared_dependencies():
    names = {one.name for one in make_agent_group().wanted}

    assert {"grpcio", "protobuf", "numpy", "ml-dtypes", "blake3"} <= names
    assert not names & {"onnx", "onnxruntime", "iree-base-compiler", "paramiko"}
    assert make_runtime_group("iree").name.startswith("iree=")
    assert make_runtime_group("vendors-own") == WheelGroup("vendors-own", ())

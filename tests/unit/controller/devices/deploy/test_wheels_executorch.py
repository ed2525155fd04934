"""ExecuTorch on a board: a CPU build of PyTorch without unneeded files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from support.deploying import empty_index

from hil.controller.devices.deploy.packages import Interpreter, NoWheels, iter_wheel_files
from hil.controller.devices.deploy.wheels import WheelGroup, fetch_packages, make_runtime_group
from hil.controller.storage.cache import Cache

ARM = Interpreter("/usr/bin/python3.11", (3, 11), "aarch64", "glibc-2.31")


def test_executorch_group_uses_cpu_torch():
    group = make_runtime_group("executorch")
    assert [one.name for one in group.wanted] == ["executorch", "torch", "flatbuffers"]
    torch = group.wanted[1]
    assert torch.exact == torch.loose
    assert torch.loose.startswith("torch==2.")
    assert torch.loose.endswith("+cpu")


def test_missing_torch_error_names_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    empty_index(tmp_path, monkeypatch)
    torch = make_runtime_group("executorch").wanted[1]
    with pytest.raises(NoWheels, match=r"torch==2\.[0-9.]+\+cpu is not published for Python 3\.11 on aarch64") as error:
        fetch_packages(ARM, [WheelGroup("g", (torch,))], say=lambda text: None, cache=Cache(tmp_path / "cache"))
    assert "PIP_EXTRA_INDEX_URL" in error.value.hint


def test_wheel_files_drop_unneeded_torch_files(tmp_path: Path):
    contents = {
        "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": {
            "torch/__init__.py": True,
            "torch/lib/libtorch_cpu.so": True,
            "torch/bin/torch_shm_manager": True,
            "torch/bin/protoc": False,
            "torch/bin/test_jit": False,
            "torch/include/ATen/ATen.h": False,
            "torch/_inductor/config.py": False,
        },
        "executorch-1.5.1-cp311-cp311-manylinux_2_28_x86_64.whl": {
            "executorch/extension/pybindings/_C.cpython-311-x86_64-linux-gnu.so": True,
            "executorch/lib/libexecutorch.so": True,
            "executorch/exir/__init__.py": False,
            "executorch/backends/xnnpack/__init__.py": False,
        },
    }
    for name, files in contents.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for file in files:
                wheel.writestr(file, "x")
        kept = [file for file, _ in iter_wheel_files(tmp_path / name)]
        assert sorted(kept) == sorted(file for file, stays in files.items() if stays)

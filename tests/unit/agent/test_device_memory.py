"""The memory of a device comes from its runtime, or from the kernel's statistics of GPU drivers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.agents import Program

from hil.agent import device_memory
from hil.agent.device_memory import read_device_memory, read_drm_bytes

# Linux, Documentation/gpu/drm-usage-stats.rst; the numbers of an AMD and of an Arm GPU.
AMD = """pos:\t0
flags:\t02100002
drm-driver:\tamdgpu
drm-client-id:\t23
drm-pdev:\t0000:03:00.0
drm-memory-vram:\t999999 KiB
drm-total-vram:\t2048 KiB
drm-resident-vram:\t1024 KiB
drm-resident-gtt:\t4 MiB
drm-engine-gfx:\t123 ns
"""
ARM = "drm-driver:\tpanfrost\ndrm-client-id:\t7\ndrm-memory-memory:\t4096\n"


@pytest.fixture
def process(tmp_path: Path) -> Path:
    for folder in ("fd", "fdinfo"):
        (tmp_path / folder).mkdir()
    return tmp_path


def add_descriptor(process: Path, number: int, target: str, text: str) -> None:
    (process / "fd" / str(number)).symlink_to(target)
    (process / "fdinfo" / str(number)).write_text(text)


def test_read_drm_bytes_adds_regions_of_each_client_once(process):
    add_descriptor(process, 3, "/dev/dri/renderD128", AMD)
    add_descriptor(process, 4, "/dev/dri/renderD128", AMD)
    add_descriptor(process, 5, "/dev/dri/renderD129", ARM)
    add_descriptor(process, 6, "/etc/passwd", AMD)
    assert read_drm_bytes(process) == (1 << 20) + (4 << 20) + 4096


def test_read_drm_bytes_returns_zero_without_statistics(process, tmp_path):
    add_descriptor(process, 3, "/dev/dri/renderD128", "pos:\t0\ndrm-memory-vram:\tmany KiB\n")
    assert read_drm_bytes(process) == read_drm_bytes(tmp_path / "missing") == 0


def test_read_device_memory_prefers_runtime(monkeypatch):
    monkeypatch.setattr(device_memory, "read_drm_bytes", lambda: 5)
    assert read_device_memory(SimpleNamespace(get_peak_device_memory=lambda: 7)) == 7
    assert read_device_memory(SimpleNamespace(get_peak_device_memory=lambda: None)) == 5
    assert read_device_memory(SimpleNamespace()) == 5


def test_iree_reports_memory_only_if_statistics_are_complete(add_programs):
    from hil.agent.runtimes.iree import IreeRuntime

    add: Program = add_programs["iree"]
    found = {}
    for device in ("local-sync", "local-task"):
        program = IreeRuntime({}).load(add.path.parent, add.path.name, device, "")
        inputs = [np.ones([dim for dim in spec.shape], spec.dtype) for spec in program.inputs]
        program.bind(inputs)
        program.run()
        outputs = [array.copy() for array in program.fetch()]  # views must not outlive the device
        found[device] = program.get_peak_device_memory()
        needed = sum(array.nbytes for array in [*inputs, *outputs])
    # The allocator of local-task does not count results.
    assert found["local-task"] is None
    assert needed > 0 and needed <= found["local-sync"] < needed + 1024

"""ONNX Runtime's providers are found by name, including those of separate packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import onnxruntime as ort
import pytest

from hil.agent.runtimes import onnxruntime_providers
from hil.agent.runtimes.onnxruntime_providers import (
    ProviderDevice,
    find_device,
    list_providers,
    open_session,
    register_libraries,
)
from hil.errors import LoadFailed

CPU = "CPUExecutionProvider"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for packages, of which none was registered."""
    monkeypatch.setattr(onnxruntime_providers, "_registered", set())
    monkeypatch.setattr(onnxruntime_providers, "_plugins", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def add_package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def test_list_providers_starts_with_cpu_and_omits_services():
    assert list_providers()[0] == CPU
    assert "AzureExecutionProvider" not in list_providers()


def test_find_device_returns_provider_and_options(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU])
    assert find_device("") == ProviderDevice(CPU)
    assert find_device("cuda://1") == ProviderDevice("CUDAExecutionProvider", {"device_id": "1"})
    with pytest.raises(LoadFailed, match="expected KEY=VALUE"):
        find_device("cuda://device_id=")


def test_find_device_lists_available_providers(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU])
    with pytest.raises(LoadFailed, match="lacks execution provider 'cuda2'") as caught:
        find_device("cuda2")
    assert "available: CPUExecutionProvider, CUDAExecutionProvider" in caught.value.hint


def test_register_libraries_uses_installed_packages_once(packages, monkeypatch):
    registered = []
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda *given: registered.append(given))
    add_package(
        packages, "onnxruntime_fake", "def get_ep_name(): return 'Fake'\ndef get_library_path(): return '/f.so'"
    )
    add_package(packages, "onnxruntime_tools2", "raise SystemExit('imported')")
    register_libraries()
    register_libraries()
    assert registered == [("Fake", "/f.so")]
    assert "onnxruntime_tools2" not in sys.modules


def test_register_libraries_reports_broken_package(packages, capfd):
    add_package(
        packages, "onnxruntime_fake2", "def get_ep_names(): return ['F']\ndef get_library_path(): return '/no.so'"
    )
    register_libraries()
    assert "cannot register the execution provider of onnxruntime_fake2" in capfd.readouterr().err
    assert list_providers()[0] == CPU


@pytest.fixture
def opened(packages: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], dict[str, str]]]:
    """Return the numbers of the devices, and the options, of each session of a provider with four devices."""
    found: list[tuple[list[int], dict[str, str]]] = []
    add_package(
        packages, "onnxruntime_fake3", "def get_ep_name(): return 'Fake'\ndef get_library_path(): return '/f.so'"
    )
    devices = [
        SimpleNamespace(ep_name="Fake", device=SimpleNamespace(type=SimpleNamespace(name=kind)), number=number)
        for number, kind in enumerate(("CPU", "GPU", "GPU", "NPU"))
    ]
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda *given: None)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(ort, "InferenceSession", lambda *given, **how: None)
    register_libraries()
    return found


def open_fake(opened: list[tuple[list[int], dict[str, str]]], options: dict[str, str]) -> None:
    settings = SimpleNamespace(
        add_provider_for_devices=lambda chosen, options: opened.append(([one.number for one in chosen], options))
    )
    open_session(Path("m.onnx"), ProviderDevice("Fake", options), settings)


@pytest.mark.parametrize(
    ("options", "number", "left"),
    [
        ({}, 0, {}),
        ({"device_id": "2"}, 2, {}),
        ({"device_type": "GPU"}, 1, {}),
        ({"device_type": "GPU", "device_id": "1", "cache": "/c"}, 2, {"cache": "/c"}),
        ({"device_type": "AUTO:GPU,CPU"}, 0, {"device_type": "AUTO:GPU,CPU"}),
    ],
)
def test_open_session_uses_selected_device_of_library(opened, options, number, left):
    open_fake(opened, options)
    assert opened == [([number], left)]


@pytest.mark.parametrize("options", [{"device_id": "4"}, {"device_type": "NPU", "device_id": "1"}])
def test_open_session_rejects_missing_device_of_library(opened, options):
    with pytest.raises(LoadFailed, match="Fake has no device with device_") as caught:
        open_fake(opened, options)
    assert caught.value.hint == "devices of this provider: 0: cpu, 1: gpu, 2: gpu, 3: npu" and not opened

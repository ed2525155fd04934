"""Find ONNX Runtime's execution providers, and open sessions that use only the requested provider."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hil.core.files import read_text
from hil.errors import LoadFailed
from hil.formats.ort_devices import find_provider, parse_provider_options, suggest_device

CPU_PROVIDER = "CPUExecutionProvider"
# ONNX Runtime lists this provider everywhere, although it computes nothing here: it calls a service.
_HIDDEN = "AzureExecutionProvider"
# Packages with a provider in a library of its own, such as onnxruntime-qnn. ONNX Runtime 1.23 and later load them.
_PACKAGES = "onnxruntime_"
_LIBRARY_FUNCTION = "def get_library_path("
_MAX_MODULE_BYTES = 1 << 20
_registered: set[str] = set()
# Providers in libraries that were registered.
_plugins: set[str] = set()
# Types of devices in ONNX Runtime, for the option ``device_type``.
_DEVICE_TYPES = ("cpu", "gpu", "npu")
_MAX_DIGITS = 3


@dataclass(frozen=True)
class ProviderDevice:
    """Execution provider, with options that select a device of this provider."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


def list_providers() -> list[str]:
    """Return the available providers, the CPU first."""
    register_libraries()
    names = [name for name in ort.get_available_providers() if name != _HIDDEN]
    return sorted(names, key=lambda name: name != CPU_PROVIDER)


def find_device(device: str) -> ProviderDevice:
    """Return the provider of a device name. Raises LoadFailed if it is not available, or an option is invalid."""
    if not device:
        return ProviderDevice(CPU_PROVIDER)
    name = find_provider(device, ort.get_available_providers())
    if not name:
        register_libraries()
        name = find_provider(device, ort.get_available_providers())
    if not name:
        there = list_providers()
        raise LoadFailed(
            f"ONNX Runtime lacks execution provider {device!r}",
            hint=f"{suggest_device(device, there)}available: {', '.join(there)}",
        )
    try:
        return ProviderDevice(name, parse_provider_options(device))
    except ValueError as error:
        raise LoadFailed(str(error), hint="such as cuda://device_id=1 or openvino://device_type=GPU") from error


def register_libraries() -> None:
    """Register the providers of installed packages. A package that fails is reported on stderr."""
    register = getattr(ort, "register_execution_provider_library", None)
    if register is None:
        return
    for module in pkgutil.iter_modules():
        if not module.name.startswith(_PACKAGES) or module.name in _registered:
            continue
        _registered.add(module.name)
        try:
            if _has_library(module.name):
                package = importlib.import_module(module.name)
                names = _list_provider_names(package)
                register(names[0], package.get_library_path())
                _plugins.update(names)
        except Exception as error:
            print(f"cannot register the execution provider of {module.name}: {error}", file=sys.stderr, flush=True)


def open_session(path: Path, provider: ProviderDevice, settings: ort.SessionOptions) -> ort.InferenceSession:
    """Create a session. The CPU runs the nodes that the provider does not support."""
    options = dict(provider.options)
    own = [one for one in ort.get_ep_devices() if one.ep_name == provider.name] if provider.name in _plugins else []
    if own:
        device = _take_device(own, options, provider.name)
        settings.add_provider_for_devices([device], options)
        return ort.InferenceSession(str(path), settings, enable_fallback=0)
    # With fallback, a provider that fails to open would be silently replaced by the CPU.
    return ort.InferenceSession(str(path), settings, providers=[(provider.name, options)], enable_fallback=0)


def list_hardware(providers: list[str]) -> list[dict[str, Any]]:
    """Return the devices of the providers. ONNX Runtime reports them since version 1.23."""
    try:
        found = ort.get_ep_devices()
    except Exception:
        return []
    return [
        {
            "id": one.ep_name,
            "name": one.device.metadata.get("Description") or one.device.vendor,
            "type": one.device.type.name.lower(),
            "driver": one.ep_metadata.get("version", ""),
            "properties": {},
        }
        for one in found
        if one.ep_name in providers
    ]


def _has_library(module: str) -> bool:
    """Return True if a package defines the function that ONNX Runtime's documentation requires. Imports nothing."""
    spec = importlib.util.find_spec(module)
    return bool(spec and spec.origin and _LIBRARY_FUNCTION in read_text(Path(spec.origin), _MAX_MODULE_BYTES))


def _list_provider_names(package: Any) -> list[str]:
    """Return the providers of a package. Its library is registered under the first name."""
    names = list(package.get_ep_names()) if hasattr(package, "get_ep_names") else []
    first = package.get_ep_name() if hasattr(package, "get_ep_name") else names[0]
    return [str(name) for name in dict.fromkeys((first, *names))]


def _take_device(devices: list[Any], options: dict[str, str], provider: str) -> Any:
    """Return the device that the options of a provider in a library select, and remove these options.

    ONNX Runtime passes the device to the provider. Options with another device would have no effect.

    Raises:
        LoadFailed: there is no such device.
    """
    found, text = devices, ""
    if (kind := options.get("device_type", "").lower()) in _DEVICE_TYPES:
        text = f" with device_type={options.pop('device_type')}"
        found = [one for one in devices if one.device.type.name.lower() == kind]
    place = options.get("device_id", "")
    if len(devices) > 1 and place.isascii() and place.isdecimal() and len(place) <= _MAX_DIGITS:
        text += f" with device_id={options.pop('device_id')}"
        found = found[int(place) :]
    if not found:
        kinds = ", ".join(f"{number}: {one.device.type.name.lower()}" for number, one in enumerate(devices))
        raise LoadFailed(f"{provider} has no device{text}", hint=f"devices of this provider: {kinds}")
    return found[0]

"""Names of ONNX Runtime's execution providers as devices: ``cuda``, ``CUDAExecutionProvider``, ``cuda://device_id=1``."""

from __future__ import annotations

from collections.abc import Iterable

from hil.errors import did_you_mean

_SUFFIX = "executionprovider"
# Other names of providers.
_ALIASES = {"directml": "dml", "trt": "tensorrt"}
# Provider -> option for a value without a key.
_PLAIN_KEYS = {"openvino": "device_type"}
_PLAIN_KEY = "device_id"
_CPU = "cpu"


def shorten_provider(name: str) -> str:
    """Return the short name of a provider: ``cuda`` for ``CUDAExecutionProvider`` or ``cuda://1``.

    Other devices only become lower case.
    """
    short = name.partition("://")[0].lower().removesuffix(_SUFFIX)
    return _ALIASES.get(short, short)


def find_provider(device: str, providers: Iterable[str]) -> str:
    """Return the provider with a full or short name, or ""."""
    wanted = shorten_provider(device)
    return next((name for name in providers if shorten_provider(name) == wanted), "")


def suggest_device(device: str, devices: Iterable[str]) -> str:
    """Return the start of a hint with a similar device; "" without one.

    All providers have the same suffix, so it is not compared. The CPU is not a suggestion for ``gpu`` or ``cuda``.
    """
    short = shorten_provider(device)
    known = [one for one in devices if shorten_provider(one) != _CPU or short.startswith(_CPU[:2])]
    names = dict.fromkeys(map(shorten_provider, known))
    if device.lower().endswith(_SUFFIX):
        return did_you_mean(short, names)
    return did_you_mean(device, {**names, **dict.fromkeys(known)})


def parse_provider_options(device: str) -> dict[str, str]:
    """Return the provider options in a device name: ``cuda://1`` selects the second GPU, ``openvino://GPU`` the GPU.

    Raises:
        ValueError: an option has no name or no value.
    """
    options = {}
    for text in filter(None, device.partition("://")[2].split(",")):
        key, is_named, value = text.partition("=")
        if not is_named:
            key, value = _PLAIN_KEYS.get(shorten_provider(device), _PLAIN_KEY), text
        if not key or not value:
            raise ValueError(f"invalid option {text!r} of device {device!r}: expected KEY=VALUE")
        options[key] = value
    return options

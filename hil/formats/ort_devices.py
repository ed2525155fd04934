"""Names of ONNX Runtime's execution providers as devices: ``cuda``, ``CUDAExecutionProvider``, ``cuda://device_id=1``."""

from __future__ import annotations

from collections.abc import Iterable

_SUFFIX = "executionprovider"
# Other names of providers.
_ALIASES = {"directml": "dml", "trt": "tensorrt"}
# Provider -> option for a value without a key.
_PLAIN_KEYS = {"openvino": "device_type"}
_PLAIN_KEY = "device_id"


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

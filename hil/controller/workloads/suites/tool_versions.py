"""What a suite's run is made with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError

from hil.controller.storage.versions import version
from hil.core.installation import own_version

_PACKAGES = ("onnx", "onnxruntime", "iree-base-compiler", "iree-base-runtime", "numpy")
# Those of hil's extras, told where they are installed.
_FRAMEWORKS = ("torch", "executorch", "torchvision", "torchaudio", "tensorflow", "tensorflow-cpu", "ai-edge-litert")


def versions() -> dict[str, str]:
    """Tool -> version, and what the host is."""
    return {
        "hil": own_version(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        **installed(_FRAMEWORKS),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of some packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

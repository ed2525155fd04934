"""The options of traces: which backends, and where artifacts go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_TARGETS = "iree_llvmcpu"
DEFAULT_FOLDER = "hil-traces"
# Name of the option -> what it is for; pytest has them, and test files that are run by themselves.
TEXTS = {
    "target_backends": "Backends that traces are compared on, with commas: tf, iree_llvmcpu, iree_vmvx, iree_cuda, "
    f"iree_vulkan, tflite, board:NAME (default {DEFAULT_TARGETS}).",
    "reference_backend": "The backend that they are compared with (default: tf, and for model files their reference).",
    "artifacts_dir": f"Where programs and traces are kept (default {DEFAULT_FOLDER}).",
}
# What they are called among pytest's options: a project's own of the same name says nothing about backends.
PYTEST_DEST = "hil_traces_{}"


@dataclass(frozen=True)
class TraceOptions:
    """What was asked for.

    Attributes:
        target_backends: names with commas; "" is :data:`DEFAULT_TARGETS`.
        reference_backend: a name; "" is the module's own.
        artifacts_dir: the folder.
    """

    target_backends: str = ""
    reference_backend: str = ""
    artifacts_dir: Path = Path(DEFAULT_FOLDER)

    @classmethod
    def of(cls, target_backends: Any, reference_backend: Any, artifacts_dir: Any) -> TraceOptions:
        """Options as a parser gives them, each a text or None."""
        folder = Path(artifacts_dir) if artifacts_dir else Path(DEFAULT_FOLDER)
        return cls(target_backends or "", reference_backend or "", folder)


def backends_text(text: str) -> str:
    """Return a list of backends, looked at as it is typed.

    Raises:
        ValueError: it names one that there is not; says which.
    """
    from argparse import ArgumentTypeError

    from hil.controller.backends.references import references
    from hil.errors import UsageError
    from hil.testing.traces.backends import parse_targets

    try:
        parse_targets(text, tuple(references()))
    except UsageError as error:
        raise ArgumentTypeError(f"{error.message} ({error.hint})" if error.hint else error.message) from None
    return text

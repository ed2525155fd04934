"""What happens in the isolated process: ExecuTorch's own serialiser writes a .bpte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.storage.tensor_files import load_tensors
from hil.errors import UsageError
from hil.formats.torch_values import to_torch


def write(program: str, suites: Mapping[str, Sequence[Mapping[str, Any]]], output: str) -> None:
    """Bundle a program with cases.

    Args:
        program: the .pte file.
        suites: method -> cases, each ``inputs`` and ``outputs``: a folder of tensors, and for every place of the method
            the tensor's name and the order in which its dimensions lie in memory, or the number that stands there.
        output: the .bpte file.

    Raises:
        UsageError: a value is none that the format takes.
    """
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer

    bundled = [
        MethodTestSuite(method, [MethodTestCase(_values(*case["inputs"]), _values(*case["outputs"])) for case in cases])
        for method, cases in suites.items()
    ]
    try:
        made = serialize_from_bundled_program_to_flatbuffer(BundledProgram(None, bundled, program))
    except (AssertionError, KeyError, TypeError) as error:
        raise UsageError(f"a .bpte cannot hold this bundle: {error}") from error
    Path(output).write_bytes(made)


def _values(folder: str, places: Sequence[Mapping[str, Any]]) -> list[Any]:
    tensors = load_tensors(Path(folder))
    return [
        to_torch(tensors[place["tensor"]], place["order"]) if "tensor" in place else place["constant"]
        for place in places
    ]

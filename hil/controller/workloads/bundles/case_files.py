"""Test cases in files: an .npz, or a folder of ``input_0.npy``, ``output_0.npy``, ... as ONNX's test data lies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hil.bundles import MethodTestCase, Signature
from hil.controller.models.inputs import fits_spec
from hil.controller.storage.tensor_files import load_pb
from hil.core.files import within
from hil.core.npy import Npz
from hil.core.tensors import Array, TensorSpec, load_npy, typed
from hil.errors import UsageError

_FILE = re.compile(r"(?P<kind>input|output)_(?P<number>\d+)\.(npy|pb)")
_FORMS = "an .npz with a key for every input (and output), or a folder of input_0.npy, ..., output_0.npy, ... (or .pb)"


def read_case(path: Path, signature: Signature, *, name: str = "") -> MethodTestCase:
    """A case from an .npz or a folder; without outputs where the file has none.

    Args:
        path: the .npz or the folder.
        signature: of the method: it tells inputs from outputs, and what dtype raw bytes are.
        name: of the case; "" is the file's.

    Raises:
        UsageError: it cannot be read, or holds what is neither.
    """
    called = name or path.stem
    if path.is_dir():
        found = [_folder(path, *kind) for kind in (("input", signature.inputs), ("output", signature.outputs))]
        return MethodTestCase(found[0], found[1], name=called)
    if path.suffix != ".npz":
        raise UsageError(f"{path} is no case that hil can read", hint=_FORMS)
    specs = {spec.name: spec for spec in (*signature.outputs, *signature.inputs)}
    with Npz(path) as archive:
        if unknown := [key for key in archive.keys if key not in specs]:
            known = ", ".join(specs)
            raise UsageError(f"{path} holds {unknown[0]!r}, which the method neither takes nor gives", hint=known)
        named = {
            key: typed(archive.read(key, fits_spec(spec, strict=False)), spec.dtype)
            for key in archive.keys
            for spec in [specs[key]]
        }
    inputs = {spec.name for spec in signature.inputs}
    return MethodTestCase(
        {key: array for key, array in named.items() if key in inputs},
        {key: array for key, array in named.items() if key not in inputs},
        name=called,
    )


def _folder(path: Path, kind: str, specs: Sequence[TensorSpec]) -> list[Array]:
    found: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match and match["kind"] == kind:
            number = int(match["number"])
            if number in found:
                raise UsageError(f"{path} has {kind} {number} twice: {found[number].name} and {file.name}")
            found[number] = within(path, file)
    if sorted(found) != list(range(len(found))):
        missing = min(set(range(len(found))) - set(found))
        raise UsageError(f"{path} lacks {kind}_{missing}", hint=_FORMS)
    return [read_tensor(found[number], specs[number].dtype if number < len(specs) else "") for number in sorted(found)]


def read_tensor(path: Path, dtype: str) -> Array:
    """The tensor in a .npy or .pb file, as ``dtype`` where the form forgot it; a .npy is mapped.

    Raises:
        UsageError: it cannot be read.
    """
    if path.suffix == ".pb":
        return load_pb(path)
    return load_npy(path, dtype, mmap=True)

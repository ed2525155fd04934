"""Bundles for tests. Nothing runs their programs, so the programs can be invalid."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite
from hil.bundles.layout import HEADER_BYTES, Head, align_offset, encode_canonical_json
from hil.compare.control import measure_control
from hil.compare.verdict import compare_output
from hil.core.digest import digest_of
from hil.core.results import Artifact, Control
from hil.core.tensors import TensorSpec

X = TensorSpec("x", "float32", ("N", 2))
Y = TensorSpec("y", "float32", ("N",))


def program(folder: Path, inputs: Sequence[TensorSpec] = (X,), outputs: Sequence[TensorSpec] = (Y,)) -> Artifact:
    """Return a program of two files that no runtime could load."""
    (folder / "weights").mkdir(exist_ok=True)
    files = {"main.bin": folder / "main.bin", "weights/w.bin": folder / "weights" / "w.bin"}
    for name, path in files.items():
        path.write_bytes(name.encode() * 7)
    return Artifact("none", "main.bin", files, {}, "f", "nobody 1", ("--flag",), tuple(inputs), tuple(outputs))


def case(size: int = 3, **more: Any) -> MethodTestCase:
    """Return a case for the program above."""
    x = np.arange(2 * size, dtype=np.float32).reshape(size, 2)
    return MethodTestCase([x], [x.sum(1)], **more)


def control(size: int = 6) -> dict[str, Control]:
    """Return the control for the output of such a case. One element jumps, and one element overflows."""
    (exact,) = case(size).expected_outputs
    held = [exact * np.float32(1 + 0.001 * run) for run in range(1, 4)]
    free = [run.copy() for run in held]
    free[1][1], free[2][2] = 30, np.inf
    found = measure_control("float16", "test", exact, held, free)
    assert found is not None and found.jumping == 2
    return {"y": found}


def judge_controls(made: Bundle) -> None:
    """Compare outputs near the reference and far from it, with the control of each case."""
    for method in made.methods:
        for one in method.cases:
            for name, control in one.control.items():
                for factor in (1.002, -1.0, 40.0):
                    answer = (one.expected_outputs[name] * factor).astype(one.expected_outputs[name].dtype)
                    compare_output(name, answer, one.expected_outputs[name], control=control)


def bundle(folder: Path, *cases: MethodTestCase) -> Bundle:
    """Return a bundle of the program above."""
    return Bundle.create(program(folder), [MethodTestSuite("f", cases or (case(), case(1, rtol=0.5)))])


def forged(made: Bundle, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return the bundle file with a changed manifest, and a header that matches the new manifest."""
    document = made.head.parse_document()
    blobs = {item["digest"]: item["size"] for item in document["blobs"]}
    data = {digest: blob for digest, blob in made._blobs.items()}
    replaced = change(document)
    text = replaced if isinstance(replaced, bytes) else encode_canonical_json(document)
    size = align_offset(HEADER_BYTES + len(text)) + sum(align_offset(count) for count in blobs.values())
    head = Head(size, text).to_bytes()
    return head + b"".join(bytes(blob).ljust(align_offset(len(blob)), b"\0") for blob in data.values())


def digest_patched(raw: bytes) -> bytes:
    """Return a file with a manifest that was changed in place, and the matching digest in the header."""
    (size,) = struct.unpack_from("<Q", raw, 24)
    digest = digest_of(raw[HEADER_BYTES : HEADER_BYTES + size]).partition(":")[2]
    return raw[:32] + bytes.fromhex(digest) + raw[64:]

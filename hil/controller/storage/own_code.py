"""Digests of hil's own code, for keys of the cache: what it made must not outlive a change of the code that made it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hil.core.digest import digest_of

_HIL = Path(__file__).parents[2]
# What rewrites ONNX models for IREE's importer, and what that rests on.
ONNX_REWRITING = ("controller/models/onnx_*.py", "controller/models/importers/onnx*.py", "formats/onnx_*.py")


@cache
def code_digest(*patterns: str) -> str:
    """Return the digest of the files of the package ``hil`` that match patterns.

    Raises:
        ValueError: a pattern matches no file.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = set(_HIL.glob(pattern))
        if not found:
            raise ValueError(f"no file of hil matches {pattern!r}")
        files |= found
    return digest_of(b"".join(file.read_bytes() for file in sorted(files)))

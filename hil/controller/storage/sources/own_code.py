"""Compute digests of hil's source code for cache keys. When the code changes, cached results become stale."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hil.core.digest import digest_of

_HIL = Path(__file__).parents[3]
# Files that rewrite ONNX models for IREE's importer, with their dependencies.
ONNX_REWRITING = ("controller/models/onnx_files/onnx_*.py", "controller/models/importers/onnx*.py", "formats/onnx_*.py")


@cache
def digest_code(*patterns: str) -> str:
    """Return the digest of the files of the package ``hil`` that match patterns.

    Raises:
        ValueError: a pattern matches no file.
    """
    files: set[Path] = set()
    for pattern in patterns:
        found = set(_HIL.glob(pattern))
        if not found:
            raise ValueError(f"no hil file matches {pattern!r}")
        files |= found
    return digest_of(b"".join(file.read_bytes() for file in sorted(files)))

"""Compute the digest of hil's code that affects reference outputs, for the cache keys of these outputs."""

from __future__ import annotations

from hil.controller.storage.sources.own_code import ONNX_REWRITING, digest_code


def own_code() -> str:
    """Return the digest of the files that define options, rewriting and arithmetic of references."""
    backends = ("controller/backends/references/**/*.py", "controller/backends/compilers/**/*.py")
    return digest_code(*backends, *ONNX_REWRITING, "compare/control.py", "compare/groups.py")

"""A digest of hil's own code that decides what references compute: part of the keys of what is cached."""

from __future__ import annotations

from hil.controller.storage.own_code import ONNX_REWRITING, code_digest


def own_code() -> str:
    """Return the digest of the files with options, rewriting and arithmetic of references."""
    backends = ("controller/backends/references/**/*.py", "controller/backends/compilers/*.py")
    return code_digest(*backends, *ONNX_REWRITING, "compare/control.py", "compare/groups.py")

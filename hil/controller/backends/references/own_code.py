"""A digest of hil's own code that decides what references compute: part of the keys of what is cached."""

from __future__ import annotations

from hil.controller.storage.own_code import ONNX_REWRITING, code_digest


def own_code() -> str:
    """Return the digest of the files with options, rewriting and arithmetic of references."""
    here = "controller/backends"
    return code_digest(f"{here}/references/**/*.py", f"{here}/compilers/*.py", *ONNX_REWRITING, "compare/control.py")

"""A digest of hil's own code that decides what references compute: part of the keys of what is cached."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hil.core.digest import digest_of

_HERE = Path(__file__).parent
_HIL = _HERE.parents[2]


@cache
def own_code() -> str:
    """Return the digest of the files with options, rewriting and arithmetic of references."""
    rewriting = [*(_HIL / "controller" / "models").glob("onnx_*.py"), *(_HIL / "formats").glob("onnx_*.py")]
    files = [*_HERE.rglob("*.py"), *(_HERE.parent / "compilers").glob("*.py"), *rewriting]
    files.append(_HIL / "compare" / "control.py")
    return digest_of(b"".join(file.read_bytes() for file in sorted(files)))

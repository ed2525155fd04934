"""The names of compilers, known without loading one."""

from __future__ import annotations

from hil.controller.storage.registry import points

BUILT_IN = ("executorch", "iree", "none", "tfcompile")


def compiler_names() -> tuple[str, ...]:
    """The names of the built-in compilers and of those of the entry point group ``hil.compilers``, sorted."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in points("hil.compilers"))}))

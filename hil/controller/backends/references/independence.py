"""What a reference shares with the program that it judges.

:data:`SHARED` is the one table of that. A reference that shares importer and compiler is a self-check: the same mistake
is in both answers. One that shares kernels or the build is of the same library. One that shares nothing, or only what
reads the model's file, is independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hil.core.guarded import package_of
from hil.core.results import Relation

IMPORTER, COMPILER, KERNELS, BUILD = "importer", "compiler", "kernels", "build"
_ALL = (IMPORTER, COMPILER, KERNELS, BUILD)
# (runtime of the program, reference) -> what they share; pairs that are not here share nothing.
SHARED: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        # IREE's importers, its compiler and the code that it generates.
        ("iree", "iree-llvm-cpu"): _ALL,
        # torch.export reads the program; torch-mlir and IREE do the rest.
        ("iree", "torch-eager"): (IMPORTER,),
        # TensorFlow reads the model and lowers it to StableHLO.
        ("iree", "tensorflow"): (IMPORTER,),
        # The reference runs without the optimizer.
        ("onnxruntime", "onnxruntime"): (IMPORTER, KERNELS, BUILD),
        ("onnxruntime", "torch-eager"): (IMPORTER,),
        ("onnxruntime", "tensorflow"): (IMPORTER,),
        # The kernels are plain loops, of the same build.
        ("tflite", "tflite"): (IMPORTER, BUILD),
        ("tflite", "tflite-builtin"): (IMPORTER, KERNELS, BUILD),
        ("tflite", "tensorflow"): (IMPORTER,),
        # ExecuTorch is linked against PyTorch, and torch.export decomposes the operators for both.
        ("executorch", "torch-eager"): (IMPORTER, BUILD),
        # tfcompile is a part of TensorFlow's wheel.
        ("xla-aot", "tensorflow"): (IMPORTER, BUILD),
    }
)


def shared_parts(runtime: str, reference: str) -> tuple[str, ...]:
    """Return what a reference shares with the programs of a runtime.

    Runtimes and references of packages are not in the table: those of one package share its build.
    """
    if (runtime, reference) in SHARED:
        return SHARED[runtime, reference]
    package = package_of("hil.references", reference)
    same = package and package in (package_of(f"hil.{kind}", runtime) for kind in ("runtimes", "compilers"))
    return (BUILD,) if same else ()


def relation_of(runtime: str, reference: str) -> Relation:
    """Return the relation of a reference to the programs of a runtime."""
    parts = shared_parts(runtime, reference)
    if IMPORTER in parts and COMPILER in parts:
        return Relation.SELF_CHECK
    return Relation.SAME_LIBRARY if {COMPILER, KERNELS, BUILD}.intersection(parts) else Relation.INDEPENDENT

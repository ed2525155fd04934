"""Determine which code a reference shares with the program that it judges.

:data:`SHARED` lists the shared parts. A reference that shares importer and compiler is a self-check, because both
results contain the same errors. A reference that shares kernels or the build belongs to the same library. A reference
that shares nothing, or only the code that reads the model file, is independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hil.core.guarded import find_package
from hil.core.results import Relation

IMPORTER, COMPILER, KERNELS, BUILD = "importer", "compiler", "kernels", "build"
_ALL = (IMPORTER, COMPILER, KERNELS, BUILD)
# (the program's runtime, reference) -> shared parts. Missing pairs share nothing.
SHARED: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        # IREE's importers, compiler and generated code.
        ("iree", "iree-llvm-cpu"): _ALL,
        # torch.export reads the program; torch-mlir and IREE do the rest.
        ("iree", "torch-eager"): (IMPORTER,),
        # TensorFlow reads the model and lowers it to StableHLO.
        ("iree", "tensorflow"): (IMPORTER,),
        # The reference runs without the optimizer.
        ("onnxruntime", "onnxruntime"): (IMPORTER, KERNELS, BUILD),
        ("onnxruntime", "torch-eager"): (IMPORTER,),
        ("onnxruntime", "tensorflow"): (IMPORTER,),
        # The kernels are plain loops from the same build.
        ("tflite", "tflite"): (IMPORTER, BUILD),
        ("tflite", "tflite-builtin"): (IMPORTER, KERNELS, BUILD),
        ("tflite", "tensorflow"): (IMPORTER,),
        # ExecuTorch is linked against PyTorch, and torch.export decomposes the operators for both.
        ("executorch", "torch-eager"): (IMPORTER, BUILD),
        # tfcompile is part of TensorFlow's wheel.
        ("xla-aot", "tensorflow"): (IMPORTER, BUILD),
    }
)


def list_shared_parts(runtime: str, reference: str) -> tuple[str, ...]:
    """Return the parts that a reference shares with programs of a runtime.

    Runtimes and references of plugins are not in the table. If both are from the same package, they share its build.
    """
    if (runtime, reference) in SHARED:
        return SHARED[runtime, reference]
    package = find_package("hil.references", reference)
    same = package and package in (find_package(f"hil.{kind}", runtime) for kind in ("runtimes", "compilers"))
    return (BUILD,) if same else ()


def find_relation(runtime: str, reference: str) -> Relation:
    """Return the relation of a reference to the programs of a runtime."""
    parts = list_shared_parts(runtime, reference)
    if IMPORTER in parts and COMPILER in parts:
        return Relation.SELF_CHECK
    return Relation.SAME_LIBRARY if {COMPILER, KERNELS, BUILD}.intersection(parts) else Relation.INDEPENDENT

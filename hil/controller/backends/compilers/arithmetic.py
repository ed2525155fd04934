"""Compile for a board with narrower arithmetic: the flag ``--arithmetic=NAME`` rewrites an ONNX model.

IREE has no such flags. Its flags demote only the inputs of contractions, and only for matrix products from MLIR.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.models.compiling import LOG, call_isolated, compile_cached, convert_compiler_errors
from hil.controller.storage.cache import Cache, read_digests
from hil.controller.storage.sources.own_code import ONNX_REWRITING, digest_code
from hil.core.arithmetic import ARITHMETIC_FLAG, FLOAT32, check_arithmetic
from hil.core.digest import digest_of
from hil.core.installed import get_version
from hil.core.results import Model
from hil.formats.onnx_file import load_onnx

if TYPE_CHECKING:
    from hil.controller.models.compiling import Work

# Larger models store weights in an external file, because protobuf limits a message to 2 GiB.
_MAX_BYTES = 1 << 30
_FILE = "model.onnx"


def split_flags(flags: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the requested arithmetic ("" for float32) and the remaining flags.

    Raises:
        UsageError: unknown arithmetic.
    """
    asked = [flag.removeprefix(ARITHMETIC_FLAG) for flag in flags if flag.startswith(ARITHMETIC_FLAG)]
    name = check_arithmetic(asked[-1], ARITHMETIC_FLAG) if asked else ""
    return "" if name == FLOAT32 else name, tuple(flag for flag in flags if not flag.startswith(ARITHMETIC_FLAG))


def convert_arithmetic(model: Model, arithmetic: str, work: Work) -> Model:
    """Rewrite an ONNX model to compute in an arithmetic: see :mod:`hil.formats.onnx_arithmetic`.

    Raises:
        CompileFailed, CompileCrashed, StageTimeout: the model cannot be rewritten.
    """
    key = Cache.key(
        "arithmetic",
        model=model.digest,
        dims=dict(model.dims),
        arithmetic=arithmetic,
        onnx=get_version("onnx"),
        code=digest_code(*ONNX_REWRITING, "controller/backends/compilers/arithmetic.py"),
    )

    def build(folder: Path) -> None:
        arguments = {
            "model": str(model.path.absolute()),
            "dims": dict(model.dims),
            "arithmetic": arithmetic,
            "output": str(folder / _FILE),
        }
        call_isolated(write, arguments, work)

    meta = {"model": model.name, "arithmetic": arithmetic}
    entry, _ = compile_cached(key, meta, work, None, build, convert_compiler_errors(f"rewriting for {arithmetic}"))
    digests = {name: digest for name, digest in read_digests(entry).items() if name != LOG}
    return replace(
        model,
        path=entry / _FILE,
        files={name: entry / name for name in digests},
        digest=digest_of(json.dumps(digests, sort_keys=True).encode()),
    )


def write(model: str, dims: dict[str, int], arithmetic: str, output: str) -> None:
    """Write the rewritten model. Runs in an isolated process."""
    import onnx

    from hil.controller.backends.compilers.onnx_to_mlir import save_prepared
    from hil.controller.models.importers.onnx_data import embed_all
    from hil.formats.onnx_arithmetic import rewrite

    source, target = Path(model), Path(output)
    save_prepared(source, dims, target)
    plain = load_onnx(target)
    embed_all(plain, source.parent)
    made = rewrite(plain, arithmetic)
    external = made.ByteSize() > _MAX_BYTES
    onnx.save(made, target, save_as_external_data=external, location=f"{target.name}.data")

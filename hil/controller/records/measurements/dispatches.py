"""Records of dispatch tests: the output of `hil layers --dispatches`, and dispatches.json."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Number, Record, note
from hil.controller.records.decisions.bisect import BisectFinding
from hil.controller.records.run import StoredSpec


class DispatchResult(Record, kw_only=True):
    """Result of a dispatch that ran alone."""

    key: Annotated[str, note("name in profiles (`op`) and compile-time profiles (`dispatch`)")]
    nodes: Annotated[list[str], note("nodes of the model, as in profiles (`onnx_nodes`)")]
    op_types: list[str]
    calls: Annotated[Count, note("number of call sites in the program")]
    inputs: list[StoredSpec] = []
    outputs: list[StoredSpec] = []
    against: Annotated[str, note("`numpy`, `iree-llvm-cpu`, or empty if the dispatch cannot run alone")] = ""
    finding: Annotated[BisectFinding, note("SKIP if the dispatch cannot run alone, or is not judged")]
    device_p50_ns: Annotated[Number, note("median of the timed runs; null without a warm run")] = None
    instructions: Annotated[
        float | None, note("median of the timed runs; null without --instructions, or if the board cannot count")
    ] = None
    compile_s: Annotated[Number, note("null if the program was in the cache")] = None
    run: Annotated[str, note("command that repeats the stored dispatch; empty if not stored")] = ""


class DispatchList(Record, kw_only=True):
    """Output of `hil layers --dispatches`."""

    schema: Literal[1]
    model: str
    board: str
    flags: Annotated[list[str], note("flags of the compiler")]
    dispatches: Annotated[list[DispatchResult], note("in the program's order")]
    folder: Annotated[str, note("directory with the files of dispatches that did not pass; empty if not stored")]
    exit_code: int

"""A pass of a program under its runtime's profiler, as it came from the board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hil.core.timeline import Span


@dataclass(frozen=True)
class ProfilePass:
    """What a profiling pass brought. Its outputs are nobody's: the run that is compared is another one.

    Attributes:
        files: name -> content, as the runtime wrote it: ``profile.ireeprof`` of IREE, ``onnxruntime.json`` of ONNX
            Runtime.
        clock_pairs: (time in the files, board clock) of moments before and after the runs, in nanoseconds. Time in the
            files is, of IREE, CLOCK_MONOTONIC; of ONNX Runtime its ``ts``, counted from where they begin. Empty where
            the board could not tell: then nothing is known of when on any other clock it was.
        host: from sending to the last byte received, host clock.
        board: from the last input byte to the files being ready, board clock; None where the board has no agent to
            tell.
        warmup: so many of the first runs in the files are warm-up.
        iterations: so many runs follow them.
    """

    files: Mapping[str, memoryview]
    clock_pairs: tuple[tuple[int, int], ...]
    host: Span
    board: Span | None
    warmup: int
    iterations: int

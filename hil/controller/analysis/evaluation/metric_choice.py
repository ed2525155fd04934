"""Choose a metric by name, or load it from a user's Python file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.evaluation.detection import MeanAveragePrecision
from hil.controller.analysis.evaluation.metrics import (
    MeanSquaredError,
    Metric,
    SampleScore,
    TopK,
    WordErrorRate,
)
from hil.controller.pipeline.verdicts.accepting import load_function
from hil.controller.storage.paths import is_file
from hil.core.files import digest_file
from hil.core.tensors import Array
from hil.errors import UsageError, did_you_mean

NAMES = ("top1", "top5", "map", "wer", "mse")
_DEFAULT_FUNCTION = "score"
# A sample's outputs by name, and its label -> result.
UserScore = Callable[[Mapping[str, Array], Any], Any]


class UserMetric(Metric):
    """Metric of a user's Python file.

    The file may also define ``HIGHER_IS_BETTER`` (default True), ``BOUNDS``, the smallest and largest score, and
    ``load(path)``, which returns the array in an input file.
    """

    def __init__(self, text: str, function: UserScore) -> None:
        self.name = text
        self._function = function
        names = getattr(function, "__globals__", {})
        self.is_higher_better = bool(names.get("HIGHER_IS_BETTER", True))
        if callable(load := names.get("load")):
            self.load_file = load
        bounds = names.get("BOUNDS")
        if bounds is None:
            return
        try:
            low, high = map(float, bounds)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise UsageError(f"{text}: BOUNDS must be two numbers in ascending order, got {bounds!r:.80}")
        self.bounds = (low, high)
        self.is_share = self.bounds == (0.0, 1.0)

    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Call the user's function. Exceptions of the function become UsageError."""
        try:
            value = self._function(outputs, label)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything, even SystemExit
            raise UsageError(f"{self.name} failed: {type(error).__name__}: {error}"[:500]) from error
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.size != 1:
            raise UsageError(f"{self.name} must return a number, got {value!r:.80}")
        score = float(array.reshape(()))
        if self.bounds is not None and not self.bounds[0] <= score <= self.bounds[1]:
            raise UsageError(f"{self.name} returned {score:g}, outside BOUNDS {self.bounds}")
        return SampleScore(score, score, None)


def choose_metric(text: str, output: str = "") -> Metric:
    """Return the metric for a text of ``--metric``: a name, or ``FILE.py[:FUNCTION]``.

    Args:
        output: name of the output to score; "" is the only output. Not used by ``map`` and Python files.

    Raises:
        UsageError: the name is unknown, or the file or function cannot be loaded.
    """
    file, colon, function = text.rpartition(":") if text.rpartition(":")[0].endswith(".py") else (text, "", "")
    if file.endswith(".py"):
        if output:
            raise UsageError("--output cannot be used with a Python file", hint="choose the output in the function")
        if colon and not function:
            raise UsageError(f"invalid --metric {text!r}: expected FILE.py:FUNCTION")
        path = Path(file)
        if not is_file(path):
            raise UsageError(f"no such file: {path}", hint="--metric FILE.py[:FUNCTION]")
        function = function or _DEFAULT_FUNCTION
        metric = UserMetric(f"{path.name}:{function}", load_function(file, function))
        metric.digest = digest_file(path)
        return metric
    if text == "map":
        if output:
            raise UsageError(
                "--output cannot be used with the metric map", hint="map uses the outputs boxes, scores and classes"
            )
        return MeanAveragePrecision()
    if text in ("top1", "top5"):
        return TopK(int(text[3:]), output)
    if text == "wer":
        return WordErrorRate(output)
    if text == "mse":
        return MeanSquaredError(output)
    raise UsageError(
        f"unknown metric {text!r}", hint=f"{did_you_mean(text, NAMES)}expected {', '.join(NAMES)} or FILE.py[:FUNCTION]"
    )

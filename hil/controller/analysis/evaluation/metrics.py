"""Metrics of an evaluation: the score of every sample, and the score of all samples together."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.core.tensors import Array
from hil.errors import UsageError, did_you_mean

Weights = npt.NDArray[np.float64]
# Returns the total score. The argument contains a weight per sample, float64 [samples].
Scorer = Callable[[Weights], float]
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class SampleScore:
    """Score of a sample.

    Attributes:
        value: the sample's own score.
        evidence: JSON value from which the score of all samples is computed; see :meth:`Metric.scorer`.
        answer: JSON value that shows the model's answer. Answers of the board and of the reference are compared.
    """

    value: float
    evidence: Any
    answer: Any


class Metric(ABC):
    """Base class of metrics, which compare outputs with labels.

    Attributes:
        name: text of ``--metric``.
        is_higher_better: False for errors.
        bounds: smallest and largest score of a sample, if the total score is the mean of the samples' scores; otherwise
            None. Only metrics with bounds support an early stop.
        is_share: True if the score of all samples is a share, where 1 is 100 %.
        digest: digest of the metric's Python file; empty for metrics of hil.
        load_file: function that loads an input file other than a tensor file, or None.
    """

    name: str
    is_higher_better = True
    bounds: tuple[float, float] | None = None
    is_share = False
    digest = ""
    load_file: Callable[[Path], Any] | None = None

    @abstractmethod
    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Score the outputs for a sample. Raises UsageError if the outputs or the label do not fit the metric."""

    def scorer(self, evidence: Sequence[Any]) -> Scorer:
        """Return a function that scores all samples from their evidence. The default is the weighted mean."""
        values = np.array([float(one) for one in evidence], np.float64)
        return lambda weights: float(np.average(values, weights=weights))


class TopK(Metric):
    """Share of samples whose label is among the K classes with the largest values.

    If a label has multiple elements, the output has a row of class scores per element.
    """

    bounds = (0.0, 1.0)
    is_share = True

    def __init__(self, count: int, output: str = "") -> None:
        self.name = f"top{count}"
        self._count = count
        self._output = output

    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Return the share of correct elements, and the chosen classes as the answer."""
        array = choose_output(outputs, self._output, self.name)
        wanted = _to_classes(label)
        if array.dtype.kind in "iub" and array.size == wanted.size and self._count == 1:
            chosen = array.reshape(-1, 1).astype(np.int64)
        else:
            rows = np.asarray(array, np.float64).reshape(-1, array.shape[-1] if array.ndim else 1)
            if len(rows) != wanted.size:
                raise UsageError(
                    f"the output has {len(rows)} rows of {rows.shape[1]} classes, "
                    f"but the label has {wanted.size} elements",
                    hint=f"{self.name} needs an output [..., classes] with a row per element of the label",
                )
            if rows.shape[1] <= self._count:
                raise UsageError(f"{self.name} cannot fail: the output has only {rows.shape[1]} classes")
            # A class with NaN is never chosen. The stable sort of the negated values chooses the first of equal
            # classes.
            ranked = np.argsort(-np.where(np.isnan(rows), -np.inf, rows), axis=1, kind="stable")[:, : self._count]
            chosen = np.where(np.take_along_axis(np.isnan(rows), ranked, 1), -1, ranked)
        share = float((chosen == wanted[:, None]).any(axis=1).mean())
        return SampleScore(share, share, np.sort(chosen, axis=1).ravel().tolist())


class MeanSquaredError(Metric):
    """Mean of the squared differences between an output and the label."""

    name = "mse"
    is_higher_better = False

    def __init__(self, output: str = "") -> None:
        self._output = output

    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Return the mean squared error of the sample, computed in float64."""
        array = choose_output(outputs, self._output, self.name)
        try:
            wanted = np.asarray(_parse_text(label, "numbers"), np.float64)
            actual = np.asarray(array, np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(f"mse needs numbers: {error}") from error
        if actual.size != wanted.size or not actual.size:
            raise UsageError(f"the output has shape {actual.shape}, but the label has shape {wanted.shape}")
        with np.errstate(all="ignore"):
            value = float(np.mean((actual.ravel() - wanted.ravel()) ** 2))
        return SampleScore(value, value, None)


class WordErrorRate(Metric):
    """Number of edits that turn the outputs into the labels, divided by the number of words in all labels.

    An edit inserts, deletes or replaces a word. Words are token IDs, or words of a string. Negative IDs are padding.
    """

    name = "wer"
    is_higher_better = False
    is_share = True

    def __init__(self, output: str = "") -> None:
        self._output = output

    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Return the sample's edits per word of the label, and the number of edits and words as evidence."""
        output = choose_output(outputs, self._output, self.name)
        heard, wanted = _to_words(output, "output"), _to_words(label, "label")
        if isinstance(label, str) and output.dtype.kind in "iub" and all(map(_INTEGER.fullmatch, wanted)):
            wanted = [int(word) for word in wanted]
        edits = count_edits(heard, wanted)
        return SampleScore(edits / max(len(wanted), 1), [edits, len(wanted)], heard)

    def scorer(self, evidence: Sequence[Any]) -> Scorer:
        """Return a function that divides the edits of all samples by the words of all labels."""
        counts = np.array([[float(edits), float(words)] for edits, words in evidence], np.float64).reshape(-1, 2)

        def score(weights: Weights) -> float:
            edits, words = weights @ counts
            return float(edits / words) if words else (math.inf if edits else 0.0)

        return score


def count_edits(heard: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Return the Levenshtein distance of two sequences (Wagner and Fischer 1974)."""
    previous = list(range(len(wanted) + 1))
    for row, word in enumerate(heard, 1):
        current = [row]
        for column, other in enumerate(wanted, 1):
            replaced = previous[column - 1] + (word != other)
            current.append(min(replaced, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def choose_output(outputs: Mapping[str, Array], name: str, metric: str) -> Array:
    """Return the output to score. Raises UsageError if it does not exist, or if a model has multiple outputs."""
    if name and name not in outputs:
        raise UsageError(
            f"unknown output {name!r}", hint=f"{did_you_mean(name, list(outputs))}outputs: {', '.join(outputs)}"
        )
    if not name and len(outputs) != 1:
        raise UsageError(
            f"{metric} needs a single output, but the model has {len(outputs)}", hint=_choose_hint(outputs)
        )
    return outputs[name or next(iter(outputs))]


def _choose_hint(outputs: Mapping[str, Array]) -> str:
    return f"choose one with --output: {', '.join(outputs)}" if outputs else ""


def _to_classes(label: Any) -> npt.NDArray[np.int64]:
    array = np.asarray(_parse_text(label, "class numbers"))
    if array.dtype.kind not in "iub" and not (array.dtype.kind == "f" and (array == np.round(array)).all()):
        raise UsageError(f"the label must have class numbers, got {label!r:.80}")
    if not array.size:
        raise UsageError("the label is empty")
    return array.astype(np.int64).ravel()


def _parse_text(label: Any, what: str) -> Any:
    """Return the number in a text label, and other labels unchanged. Raises UsageError if the text is not a number."""
    if not isinstance(label, str):
        return label
    if _INTEGER.fullmatch(label):
        return int(label)
    if _DECIMAL.fullmatch(label) and math.isfinite(value := float(label)):
        return value
    raise UsageError(f"the label must have {what}, got {label!r:.80}")


def _to_words(value: Any, what: str) -> list[Any]:
    """Return words of strings, or token IDs without negative IDs."""
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        return [one for one in array.ravel().tolist() if one >= 0]
    if array.dtype.kind in "OUS" and all(isinstance(one, (str, bytes)) for one in array.ravel().tolist()):
        texts = [one.decode(errors="replace") if isinstance(one, bytes) else one for one in array.ravel().tolist()]
        return " ".join(texts).split()
    if not array.size:
        return []
    raise UsageError(f"wer needs strings or token IDs, but the {what} has {array.dtype}")

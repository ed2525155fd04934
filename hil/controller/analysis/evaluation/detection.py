"""Mean average precision of detected boxes, as in COCO.

The definition is the same as in COCO's detection evaluation (https://cocodataset.org/#detection-eval): the precision is
averaged over 101 recalls, over the IoU thresholds 0.50, 0.55, ..., 0.95, and over classes. Objects of all sizes count.
At most 100 detections per class and image count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.evaluation.metrics import Metric, SampleScore, Scorer, Weights
from hil.core.tensors import Array
from hil.errors import UsageError

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_MAX_DETECTIONS = 100
_CLASSES = ("classes", "labels", "class_ids")
# Largest class number that is exact in float64.
_MAX_CLASS = 2.0**53
Floats = npt.NDArray[np.float64]


class MeanAveragePrecision(Metric):
    """Mean average precision of outputs ``boxes`` [N, 4], ``scores`` [N] and ``classes`` [N].

    A box is x1, y1, x2, y2. A leading dimension of 1 is removed. Detections with a score of 0 or below are padding.
    Detections with NaN or infinity are ignored. The label contains ``boxes`` [M, 4] and ``classes`` [M].
    """

    name = "map"
    is_share = True

    def measure(self, outputs: Mapping[str, Array], label: Any) -> SampleScore:
        """Match the detections of an image with its labelled boxes."""
        names = next((one for one in _CLASSES if one in outputs), "classes")
        if missing := [name for name in ("boxes", "scores", names) if name not in outputs]:
            raise UsageError(
                f"the metric map needs the outputs boxes, scores and classes: missing {', '.join(missing)}",
                hint=f"the model has the outputs: {', '.join(outputs)}; for other outputs use a Python file",
            )
        if not isinstance(label, Mapping) or not {"boxes", "classes"} <= label.keys():
            raise UsageError(
                "the metric map needs a label with boxes and classes", hint='{"boxes": [[0, 0, 8, 8]], "classes": [1]}'
            )
        scores = _to_floats(outputs["scores"], "scores").ravel()
        boxes, classes = _to_boxes(outputs["boxes"]), _to_floats(outputs[names], names).ravel()
        wanted, kinds = _to_boxes(label["boxes"]), _to_floats(label["classes"], "label classes").ravel()
        if not len(scores) == len(boxes) == len(classes) or len(wanted) != len(kinds):
            raise UsageError(
                f"the metric map got {len(boxes)} boxes, {len(scores)} scores, {len(classes)} classes; "
                f"the label has {len(wanted)} boxes, {len(kinds)} classes"
            )
        if not (np.abs(kinds) < _MAX_CLASS).all():
            raise UsageError(f"the metric map needs finite class numbers in the label, got {kinds.tolist()!r:.80}")
        valid = np.isfinite(scores) & np.isfinite(boxes).all(axis=1) & (np.abs(classes) < _MAX_CLASS)
        scores, boxes, classes = scores[valid], boxes[valid], classes[valid]
        order = _choose_detections(scores, classes)
        found = [
            [int(classes[at]), float(scores[at]), hits]
            for at, hits in zip(order, _match(boxes[order], classes[order], wanted, kinds), strict=True)
        ]
        counts: dict[str, int] = {}
        for kind in kinds.astype(int).tolist():
            counts[str(kind)] = counts.get(str(kind), 0) + 1
        evidence = {"found": found, "counts": counts}
        answer = [[kind, hits] for kind, _, hits in found]
        value = self.scorer([evidence])(np.ones(1)) if counts else float(not found)
        return SampleScore(value, evidence, answer)

    def scorer(self, evidence: Sequence[Any]) -> Scorer:
        """Return a function that averages the precision over classes. A weight counts an image multiple times."""
        rows = [
            (int(kind), float(score), image, int(hits))
            for image, one in enumerate(evidence)
            for kind, score, hits in one["found"]
        ]
        counts: dict[int, Floats] = {}
        for image, one in enumerate(evidence):
            for kind, count in one["counts"].items():
                counts.setdefault(int(kind), np.zeros(len(evidence)))[image] = float(count)
        tables = {}
        for kind in counts:
            mine = sorted((row for row in rows if row[0] == kind), key=lambda row: -row[1])
            images = np.array([row[2] for row in mine], np.int64)
            bits = np.array([row[3] for row in mine], np.int64)
            hits = (bits[None, :] >> np.arange(len(THRESHOLDS))[:, None]) & 1
            tables[kind] = images, hits.astype(bool)

        def score(weights: Weights) -> float:
            found = []
            for kind, (images, hits) in tables.items():
                total = float(weights @ counts[kind])
                if total > 0:
                    found.append(_compute_average_precision(weights[images], hits, total))
            return float(np.mean(found)) if found else 0.0

        return score


def _choose_detections(scores: Floats, classes: Floats) -> npt.NDArray[np.int64]:
    """Return the detections that count, by descending score."""
    order = np.argsort(-np.where(scores > 0, scores, 0), kind="stable")
    order = order[scores[order] > 0]
    kept = [order[classes[order] == kind][:_MAX_DETECTIONS] for kind in np.unique(classes[order])]
    chosen = np.concatenate([order[:0], *kept])
    return chosen[np.argsort(-scores[chosen], kind="stable")]


def _compute_average_precision(weights: Weights, hits: npt.NDArray[np.bool_], total: float) -> float:
    """Return the mean precision over thresholds and recalls.

    Args:
        weights: weight of every detection [N], by descending score.
        hits: whether each detection is correct, [thresholds, N].
        total: weight of all labelled boxes of the class.
    """
    right = np.cumsum(hits * weights, axis=1)
    precision = right / np.maximum(np.cumsum(weights), np.finfo(float).tiny)
    # Take the largest precision at this or any higher recall.
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    padded = np.concatenate([envelope, np.zeros((len(hits), 1))], axis=1)
    places = [np.searchsorted(row / total, _RECALLS) for row in right]
    return float(np.mean([row[at] for row, at in zip(padded, places, strict=True)]))


def _match(boxes: Floats, classes: Floats, wanted: Floats, kinds: Floats) -> list[int]:
    """Return for every detection a number whose bit T is 1 if it matches a labelled box at threshold T.

    In order of descending score, each detection gets the unmatched box of its class with the largest IoU.
    """
    overlap = measure_iou(boxes, wanted)
    overlap[classes[:, None] != kinds[None, :]] = 0
    free = np.ones((len(THRESHOLDS), len(wanted)), bool)
    hits = []
    for row in overlap:
        bits = 0
        for number, threshold in enumerate(THRESHOLDS):
            able = np.where(free[number], row, 0.0)
            if able.size and able.max() >= threshold - 1e-12:
                free[number, int(able.argmax())] = False
                bits |= 1 << number
        hits.append(bits)
    return hits


def measure_iou(boxes: Floats, others: Floats) -> Floats:
    """Return the intersection of boxes [N, 4] and [M, 4], divided by the union: float64 [N, M]."""
    corner = np.maximum(boxes[:, None, :2], others[None, :, :2])
    end = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.clip(end - corner, 0, None).prod(axis=2)
    areas, other_areas = (np.clip(one[:, 2:] - one[:, :2], 0, None).prod(axis=1) for one in (boxes, others))
    union = areas[:, None] + other_areas[None, :] - shared
    return np.where(union > 0, shared / np.where(union > 0, union, 1), 0.0)


def _to_floats(value: Any, what: str) -> Floats:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the metric map needs numbers in {what}: {error}") from error


def _to_boxes(value: Any) -> Floats:
    array = _to_floats(value, "boxes")
    if array.size % 4 or (array.size and array.shape[-1] != 4):
        raise UsageError(f"the metric map needs boxes [N, 4], got shape {array.shape}")
    return array.reshape(-1, 4)

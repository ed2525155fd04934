"""Metrics of an evaluation, compared with values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.controller.analysis.evaluation.detection import measure_iou
from hil.controller.analysis.evaluation.metric_choice import choose_metric
from hil.controller.analysis.evaluation.metrics import Metric, count_edits
from hil.errors import UsageError

NAN = float("nan")


def score_all(metric: Metric, *pairs: tuple[Any, Any]) -> float:
    """Return the score of samples, each a pair of outputs and label."""
    evidence = [metric.measure(outputs, label).evidence for outputs, label in pairs]
    return metric.scorer(evidence)(np.ones(len(evidence)))


@pytest.mark.parametrize(
    ("name", "logits", "label", "value"),
    [
        ("top1", [[0, 3, 1]], 1, 1.0),
        ("top1", [[0, 3, 1]], np.array([2]), 0.0),
        ("top1", [[5, 5, 1]], 0, 1.0),  # the first of equal classes
        ("top1", [[NAN, 1, 0]], 0, 0.0),
        ("top1", [[NAN, NAN, NAN]], 0, 0.0),
        ("top1", [[1, 0, 0], [0, 0, 1]], [0, 1], 0.5),
        ("top1", [[0, 3, 1]], "1", 1.0),
        ("top1", [[0, 3, 1]], "1.0", 1.0),
        ("top5", [[9, 8, 7, 6, 5, 4, 3]], 4, 1.0),
        ("top5", [[9, 8, 7, 6, 5, 4, 3]], 5, 0.0),
    ],
)
def test_topk_scores_known_outputs(name: str, logits: Any, label: Any, value: float) -> None:
    assert choose_metric(name).measure({"y": np.array(logits, np.float32)}, label).value == value


def test_top1_accepts_class_numbers() -> None:
    assert choose_metric("top1").measure({"y": np.array([7])}, 7).value == 1.0


@pytest.mark.parametrize(
    ("name", "outputs", "label", "message"),
    [
        ("top1", {"y": np.zeros((1, 3))}, "cat", "class numbers"),
        ("top1", {"y": np.zeros((2, 3))}, 1, "2 rows of 3 classes"),
        ("top5", {"y": np.zeros((1, 5))}, 1, "cannot fail"),
        ("top1", {"y": np.zeros(3), "z": np.zeros(3)}, 1, "single output"),
        ("mse", {"y": np.zeros(3)}, [1, 2], "shape"),
        ("mse", {"y": np.zeros(3)}, "text", "numbers"),
        ("mse", {"y": np.zeros(1)}, "nan", "numbers"),
        ("mse", {"y": np.zeros(1)}, "1e999", "numbers"),
        ("top1", {"y": np.zeros((1, 3))}, "1_0", "class numbers"),
        ("wer", {"y": np.zeros(3, np.float32)}, "a", "token IDs"),
        ("map", {"boxes": np.zeros((1, 4))}, {}, "missing scores, classes"),
        ("map", dict.fromkeys(("boxes", "scores", "classes"), np.zeros((1, 4))), 3, "label with boxes"),
    ],
)
def test_metrics_reject_unsuitable_samples(name: str, outputs: Any, label: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_metric(name).measure(outputs, label)


def test_mse_averages_over_samples() -> None:
    pairs = [({"y": np.array([1.0, 2.0])}, [1, 4]), ({"y": np.array([0.0, 0.0])}, [0, 0])]
    assert score_all(choose_metric("mse"), *pairs) == 1.0


@pytest.mark.parametrize("text", ["1984", "nan", "inf", "1_000", "007"])
def test_wer_compares_numeric_transcripts_as_text(text: str) -> None:
    metric = choose_metric("wer")
    assert metric.measure({"y": np.array([text], object)}, text).value == 0
    assert metric.measure({"y": np.array([f"{text}0"], object)}, text).value == 1


def test_wer_converts_token_ids_in_text() -> None:
    assert choose_metric("wer").measure({"y": np.array([[4, 5, -1]])}, "4 5").value == 0


def test_mse_converts_text() -> None:
    assert choose_metric("mse").measure({"y": np.array([3.0])}, "1e0").value == 4


def test_wer_divides_all_edits_by_all_words() -> None:
    heard = {"y": np.array(["the cat sat"], object)}
    ids = {"y": np.array([[4, 5, -1]])}
    assert score_all(choose_metric("wer"), (heard, "the cat sat down"), (ids, [4])) == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("heard", "wanted", "edits"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2)]
)
def test_count_edits_matches_known_distances(heard: str, wanted: str, edits: int) -> None:
    assert count_edits(heard, wanted) == edits


def detect(*found: tuple[list[float], float, int]) -> dict[str, Any]:
    """Return a model's outputs for detections: box, score, class."""
    names = ("boxes", "scores", "classes")
    return {name: np.array([[one[at] for one in found]], np.float32) for at, name in enumerate(names)}


BOX, OTHER = [0, 0, 10, 10], [20, 20, 30, 30]
ONE = {"boxes": [BOX], "classes": [1]}
TWO = {"boxes": [BOX, OTHER], "classes": [1, 1]}


@pytest.mark.parametrize(
    ("outputs", "label", "value"),
    [
        (detect((BOX, 0.9, 1)), ONE, 1.0),
        (detect((BOX, 0.9, 2)), ONE, 0.0),
        (detect((BOX, 0.0, 1)), ONE, 0.0),  # padding
        (detect(([0, 0, 10, 6], 0.9, 1)), ONE, 0.3),  # an IoU of 0.6 passes 3 of 10 thresholds
        (detect((BOX, 0.9, 1)), TWO, 51 / 101),  # recalls 0 to 0.5
        (detect((OTHER, 0.9, 1), (BOX, 0.8, 1)), ONE, 0.5),  # the wrong detection is first
        (detect((BOX, 0.9, 1), (BOX, 0.8, 1)), ONE, 1.0),  # a duplicate after full recall
        (detect((BOX, 0.9, 1)), {"boxes": [BOX, OTHER], "classes": [1, 2]}, 0.5),
    ],
)
def test_map_matches_values_by_hand(outputs: Any, label: Any, value: float) -> None:
    assert score_all(choose_metric("map"), (outputs, label)) == pytest.approx(value)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 1e30])
def test_map_ignores_detections_without_class(value: float) -> None:
    outputs = detect((BOX, 0.9, 1), (OTHER, 0.8, 1))
    outputs["classes"][0, 1] = value
    measured = choose_metric("map").measure(outputs, ONE)
    assert measured.value == 1 and len(measured.answer) == 1


@pytest.mark.parametrize(("name", "at"), [("scores", (0, 0)), ("boxes", (0, 0, 2))])
def test_map_ignores_detections_that_are_not_finite(name: str, at: tuple[int, ...]) -> None:
    outputs = detect((BOX, 0.9, 1))
    outputs[name][at] = math.inf
    assert choose_metric("map").measure(outputs, ONE).answer == []


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_map_rejects_labels_without_class(value: float) -> None:
    with pytest.raises(UsageError, match="finite class numbers"):
        choose_metric("map").measure(detect((BOX, 0.9, 1)), {"boxes": [BOX], "classes": [value]})


def test_map_weights_count_images() -> None:
    metric = choose_metric("map")
    good, bad = (metric.measure(detect((box, 0.9, 1)), ONE).evidence for box in (BOX, OTHER))
    twice = metric.scorer([good, good, bad])(np.ones(3))
    assert metric.scorer([good, bad])(np.array([2.0, 1.0])) == pytest.approx(twice)


def test_iou_of_empty_boxes_is_zero() -> None:
    empty = np.array([[5.0, 5, 5, 5]])
    assert measure_iou(empty, empty).tolist() == [[0.0]]
    assert measure_iou(np.array([[0.0, 0, 2, 2]]), np.array([[1.0, 1, 3, 3]])).tolist() == [[1 / 7]]


def test_user_metric_reads_settings_of_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "HIGHER_IS_BETTER = False\nBOUNDS = (0, 2)\ndef load(path): return path.stem\n"
        "def score(outputs, label): return abs(outputs['y'].sum() - label)\ndef half(outputs, label): return 0.5\n"
    )
    metric = choose_metric(str(file))
    assert (metric.is_higher_better, metric.bounds, metric.is_share) == (False, (0.0, 2.0), False)
    assert metric.load_file is not None and metric.load_file(Path("a.png")) == "a"
    assert metric.measure({"y": np.ones(2)}, 1).value == 1.0
    assert choose_metric(f"{file}:half").measure({}, 1).value == 0.5
    with pytest.raises(UsageError, match="outside BOUNDS"):
        metric.measure({"y": np.ones(9)}, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(outputs, label): return 'a'", "must return a number"),
        ("def score(outputs, label): raise SystemExit(3)", "SystemExit"),
        ("def other(outputs, label): return 1", "function 'score' not found"),
        ("BOUNDS = 3\ndef score(outputs, label): return 1", "BOUNDS must be two numbers"),
        ("syntax error", "cannot be loaded"),
    ],
)
def test_user_metric_reports_errors(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        choose_metric(str(tmp_path / "own.py")).measure({}, 1)


def test_unknown_metric_suggests_name() -> None:
    with pytest.raises(UsageError, match="unknown metric 'top2'") as raised:
        choose_metric("top2")
    assert "top1" in raised.value.hint

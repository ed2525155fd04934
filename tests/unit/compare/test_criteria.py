"""Parsing criteria: accepted texts, and errors with a position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hil.compare.criteria import (
    Rule,
    check_outputs,
    list_function_files,
    name_outputs,
    parse_accept,
    resolve_files,
    select_criteria,
)
from hil.compare.measures import MEASURES, find_measure
from hil.compare.stats import STATISTICS
from hil.errors import UsageError, VacuousTolerance


def parse(text: str) -> Rule:
    (rule,) = parse_accept([text], lambda file, name: lambda actual, reference: True)
    return rule


def parts(text: str) -> tuple[str, list[tuple[str, Any, str, float | None]]]:
    rule = parse(text)
    found = [(one.measure.key if one.measure else "", one.arguments, one.operator, one.bound) for one in rule.criteria]
    return rule.output, found


@pytest.mark.parametrize(
    "text, output, criteria",
    [
        ("top1>=0.99", "", [("top", {"k": 1}, ">=", 0.99)]),
        ("logits: top5>=.9, kl<=1e-4", "logits", [("top", {"k": 5}, ">=", 0.9), ("kl", {}, "<=", 1e-4)]),
        ("logits:kl<1", "logits", [("kl", {}, "<", 1.0)]),
        ("Identity:0: argmax", "Identity:0", [("argmax", {}, ">=", 1.0)]),
        ("scope/y_*:rmse <= 2", "scope/y_*", [("rmse", {}, "<=", 2.0)]),
        ("argmax(axis=1)>0.5", "", [("argmax", {"axis": 1}, ">", 0.5)]),
        ("b: set(iou=0.5, at=1)>=1", "b", [("set", {"iou": 0.5, "at": 1}, ">=", 1.0)]),
        (
            "sqnr>=40,psnr>=30, ulp<=3",
            "",
            [("sqnr_db", {}, ">=", 40), ("psnr_db", {}, ">=", 30), ("max_ulp", {}, "<=", 3)],
        ),
        ("python:judge.py:same", "", [("", {}, "", None)]),
        ("boxes: python:a/judge.py:same >= 0.5", "boxes", [("", {}, ">=", 0.5)]),
        ("python: cosine>=0.9", "python", [("cosine", {}, ">=", 0.9)]),
    ],
)
def test_parse_accept_reads_outputs_and_criteria(text: str, output: str, criteria: list[Any]) -> None:
    assert parts(text) == (output, criteria)


@pytest.mark.parametrize(
    "text, message, hint",
    [
        ("", "expected [OUTPUT:] CRITERION", "top1>=0.99"),
        ("logits:", "expected [OUTPUT:] CRITERION", ""),
        ("logits: cosin>=1", "at character 9: unknown criterion 'cosin'", "did you mean 'cosine'"),
        ("top>=1", "at character 1: unknown criterion 'top'", "topK"),
        ("top0>=1", "unknown criterion 'top0'", ""),
        ("kl", "kl requires a bound", "kl<=VALUE"),
        ("kl<=x", "at character 5: 'x' is not a finite number", ""),
        ("kl<=inf", "'inf' is not a finite number", ""),
        ("kl==1", "at character 3: expected >=, <=, > or <", ""),
        ("kl<=1 2", "at character 7: expected a comma or end of text", ""),
        ("kl<=1,", "at character 7: expected a criterion name", ""),
        ("cosine<=0.9", "higher values are better", "use >="),
        ("max_abs>=0.9", "lower values are better", "use <="),
        ("top1>=1.01", "is impossible: the best value is 1", ""),
        ("max_abs<0", "max_abs<0 is impossible", ""),
        ("set(iou=2)", "at character 5: iou is '2'", ""),
        ("set(box=circle)", "expected xyxy or cxcywh", ""),
        ("kl(axis=1, axis=2)<=1", "invalid argument 'axis=2' of kl", "axis=VALUE"),
        ("rmse(axis=1)<=1", "invalid argument 'axis=1' of rmse", "valid arguments: none"),
    ],
)
def test_parse_accept_refuses_with_position_and_hint(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize("text", ["top1>=0", "cosine>=-1", "cosine>=-2", "mismatch_share<=1", "set>=0", "argmax>=-1"])
def test_parse_accept_rejects_criterion_without_failure(text: str) -> None:
    with pytest.raises(VacuousTolerance, match="cannot fail"):
        parse(text)


def test_every_statistic_has_a_criterion() -> None:
    for statistic in STATISTICS:
        measure, _ = find_measure(statistic.key)
        assert measure is not None and measure.is_higher_better is (statistic.worst is min)
    assert len({measure.key for measure in MEASURES}) == len(MEASURES)


def test_criteria_for_combines_all_matching_rules() -> None:
    rules = parse_accept(["top1>=0.5", "log*: kl<=1", "other: rmse<=1"])
    assert [one.text for one in select_criteria("logits", rules)] == ["top1>=0.5", "kl<=1"]


def test_check_outputs_suggests_similar_output() -> None:
    rules = parse_accept(["logit: kl<=1"])
    check_outputs(rules, ["logit", "other"])
    with pytest.raises(UsageError) as caught:
        check_outputs(rules, ["logits", "other"])
    assert "'logit'" in caught.value.message and "did you mean 'logits'" in caught.value.hint


def test_parse_accept_rejects_function_without_loader() -> None:
    with pytest.raises(UsageError, match="cannot be used here"):
        parse_accept(["y: python:judge.py:same"])


def test_resolve_files_makes_relative_paths_absolute() -> None:
    text = "y: rmse<=1, python:judge.py:same>=1, python:/x/b.py:f"
    resolved = resolve_files(text, Path("/base"))
    assert resolved == "y: rmse<=1, python:/base/judge.py:same>=1, python:/x/b.py:f"
    assert list_function_files([resolved]) == ["/base/judge.py", "/x/b.py"]
    assert parse(resolved).criteria[1].text == "python:judge.py:same>=1"


def test_name_outputs_expands_patterns_per_output() -> None:
    texts = ["rmse<=1", "y*: kl<=1, argmax", "z: argmax"]
    assert name_outputs(texts, ["x", "y:0"]) == ("x: rmse<=1", "y:0: rmse<=1", "y:0: kl<=1, argmax")

"""Verdicts from isolated and cumulative layer findings."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.bisect_records import bisect_record, layer_finding

from hil.compare.verdict import compare_output
from hil.controller.analysis.bisect.result import describe_layer, describe_verdict, find_exit_code, make_finding
from hil.controller.pipeline.records.record import record_comparison
from hil.controller.records.base import make_record
from hil.controller.records.decisions.bisect import BisectFindings, BisectRecord
from hil.core.results import Outcome

PASS, FAIL, SKIP = Outcome.PASS, Outcome.FAIL, Outcome.SKIP


def bisection(
    isolated: str = "", cumulative: str = "", whole: Outcome | None = PASS, exposed: Outcome | None = PASS
) -> BisectFindings:
    """Layers a, b, c, ... with outcomes by letter: P(ass), F(ail), U(nstable), S(kip), E(rror), B(oard lost)."""
    letters = {
        "P": PASS,
        "F": FAIL,
        "U": Outcome.UNSTABLE,
        "S": SKIP,
        "E": Outcome.COMPILE_ERROR,
        "B": Outcome.BOARD_LOST,
    }
    layers = [
        layer_finding(
            f"Op_{name}",
            "Op",
            (name,),
            depth,
            (f"{name}.out",),
            *(make_finding(letters[way[depth]], "why") if way else None for way in (isolated, cumulative)),
        )
        for depth, name in enumerate("abcdefg"[: len(isolated or cumulative)])
    ]
    models = {
        name: make_finding(outcome, "why") if outcome and cumulative else None
        for name, outcome in (("whole", whole), ("exposed", exposed))
    }
    return BisectFindings(layers=layers, **models)


TOGETHER = (
    "layers give different results when compiled together, or the board had an intermittent error (repeat to check)"
)
ANY_CAUSE = f"errors accumulate across layers, {TOGETHER}"


@pytest.mark.parametrize(
    ("found", "code", "verdict"),
    [
        (bisection("PPP", "PPP"), 0, "no layer is wrong, isolated and cumulative"),
        (bisection("PPP"), 0, "no layer is wrong, isolated"),
        (
            bisection("PFP", "PFF", FAIL, FAIL),
            1,
            "first wrong layer: Op_b (Op, node b), isolated and cumulative",
        ),
        (bisection("PFF"), 1, "first wrong layer: Op_b (Op, node b), isolated"),
        (bisection("PUP"), 1, "first wrong layer: Op_b (Op, node b), isolated"),
        (bisection("", "PFF", FAIL, FAIL), 1, "first wrong layer: Op_b (Op, node b), cumulative"),
        (
            bisection("PFP", "PPP"),
            1,
            "first wrong layer: Op_b (Op, node b), isolated; within tolerance in the whole model",
        ),
        (
            bisection("PFP", "PSP"),
            1,
            "first wrong layer: Op_b (Op, node b), isolated",
        ),
        (
            bisection("PFP", "PPP", FAIL),
            1,
            "first wrong layer: Op_b (Op, node b), isolated; "
            "the unchanged model also gives a wrong output, but with intermediate outputs no layer is wrong",
        ),
        (
            bisection("PPP", "PPF", FAIL, FAIL),
            1,
            "every isolated layer is correct; in the whole model the first layer out of tolerance is "
            f"Op_c (Op, node c): {ANY_CAUSE}",
        ),
        (
            bisection("PEP", "PPF", FAIL, FAIL),
            3,
            "the isolated layers that ran are correct; in the whole model the first layer out of tolerance is "
            f"Op_c (Op, node c): {ANY_CAUSE}",
        ),
        (
            bisection("PPF", "PFF", FAIL, FAIL),
            1,
            "first wrong layer: Op_c (Op, node c), isolated; "
            f"but in the whole model Op_b (Op, node b) is out of tolerance before it: {ANY_CAUSE}",
        ),
        (
            bisection("FPP", "PPF", FAIL, FAIL),
            1,
            "first wrong layer: Op_a (Op, node a), isolated; "
            "in the whole model the first layer out of tolerance is Op_c (Op, node c)",
        ),
        (
            bisection("PPP", "PPP", FAIL),
            1,
            f"no layer is wrong, isolated and cumulative, but the unchanged model gives a wrong output: {TOGETHER}",
        ),
        (
            bisection("PPP", "PSP", FAIL),
            1,
            "no judged layer is wrong, isolated and cumulative, but the unchanged model gives a wrong output: "
            f"{ANY_CAUSE}",
        ),
        (
            bisection("PPP", "SSS", FAIL, Outcome.RUN_CRASH),
            3,
            f"no layer is wrong, isolated, but the unchanged model gives a wrong output: {ANY_CAUSE}",
        ),
        (bisection("PSP", "PSP"), 0, "no judged layer is wrong, isolated and cumulative"),
        (
            bisection("PEP", "PSP", Outcome.RUN_CRASH, Outcome.RUN_CRASH),
            3,
            "no output is wrong; Op_b (Op, node b) ended in COMPILE_ERROR, isolated",
        ),
        (
            bisection("PPP", "SSS", PASS, Outcome.RUN_CRASH),
            3,
            "no output is wrong; the whole model ended in RUN_CRASH, with intermediate outputs",
        ),
        (bisection("PBB"), 4, "no output is wrong; Op_b (Op, node b) ended in BOARD_LOST, isolated"),
        (bisection("SS"), 5, "no layer was judged"),
    ],
)
def test_verdict_names_layer_and_cause(found: BisectFindings, code: int, verdict: str) -> None:
    assert describe_verdict(found) == verdict
    assert find_exit_code(found) == code


def test_layer_text_shortens_long_node_list() -> None:
    layer = layer_finding("Conv_c", "Conv", tuple("abcdef"), 0, ("y",))
    assert describe_layer(layer) == "Conv_c (Conv, nodes a, b, c, d and 2 more)"


def test_finding_reports_worst_of_multiple_outputs() -> None:
    b = np.array([1.0, 2.0])
    outputs = [record_comparison(compare_output(n, b + off, b)) for n, off in (("y", 0.25), ("z", 0.5))]
    finding = make_finding(FAIL, outputs=outputs)
    assert finding.max_abs == 0.5
    assert finding.sqnr_db == pytest.approx(10 * math.log10(5 / 0.5))
    assert make_finding(PASS).max_abs is None and make_finding(PASS).sqnr_db is None


def test_bisection_serializes_to_json() -> None:
    equal = record_comparison(compare_output("y", np.ones(2), np.ones(2)))
    layer = layer_finding("Add_a", "Add", ("a",), 0, ("y",), make_finding(PASS, outputs=[equal]))
    record = bisect_record([layer])
    document = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert document["layers"][0]["isolated"]["sqnr_db"] == "inf"
    assert document["layers"][0]["isolated"]["outcome"] == "PASS"
    assert document["layers"][0]["cumulative"] is None and document["whole"] is None
    assert document["verdict"] == "no layer is wrong, isolated"
    assert make_record(document, BisectRecord).to_json() == document

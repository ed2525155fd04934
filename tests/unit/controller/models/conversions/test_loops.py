"""Unroll loops with a known number of steps."""

from __future__ import annotations

import pytest
from iree.compiler import ir, passmanager

from hil.controller.models.conversions import loops
from hil.controller.models.conversions.loops import INLINE, unroll_loops

# A loop that counts to a number and doubles a tensor per step, with an inner loop of two steps.
COUNTED = """
func.func @main(%x: tensor<2xf32>, %n: tensor<i32>) -> (tensor<2xf32>, tensor<i32>) {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %most = stablehlo.constant dense<{most}> : tensor<i32>
  %r:2 = stablehlo.while(%i = {first}, %y = %x) : tensor<i32>, tensor<2xf32> cond {{
    %goes = func.call @goes(%i, %most) : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %goes : tensor<i1>
  }} do {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %q:2 = stablehlo.while(%j = %zero, %z = %y) : tensor<i32>, tensor<2xf32> cond {{
      %more = stablehlo.compare LT, %j, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    }} do {{
      %next = stablehlo.add %j, %one : tensor<i32>
      %sum = stablehlo.add %z, %y : tensor<2xf32>
      stablehlo.return %next, %sum : tensor<i32>, tensor<2xf32>
    }}
    %next = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %next, %q#1 : tensor<i32>, tensor<2xf32>
  }}
  return %r#1, %r#0 : tensor<2xf32>, tensor<i32>
}}
func.func private @goes(%i: tensor<i32>, %most: tensor<i32>) -> tensor<i1> {{
  %less = stablehlo.compare LT, %i, %most : (tensor<i32>, tensor<i32>) -> tensor<i1>
  return %less : tensor<i1>
}}
"""


def unrolled(**values: object) -> str:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(COUNTED.format(**values))
        passmanager.PassManager.parse(INLINE).run(module.operation)
        unroll_loops(module)
        assert module.operation.verify()
        return str(module)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_unroll_writes_out_steps_of_counted_loops(steps):
    text = unrolled(first="%zero", most=steps)
    assert "stablehlo.while" not in text
    assert text.count("stablehlo.add") == steps * (1 + 2 * 2)


def test_unroll_preserves_data_dependent_loop_but_unrolls_inner():
    assert unrolled(first="%n", most=3).count("stablehlo.while") == 1


@pytest.mark.parametrize(("most", "loops_left"), [(20, 0), (21, 1), (9000, 1)])
def test_unroll_preserves_loop_with_many_operations(monkeypatch, most, loops_left):
    # A step has five additions, four of them for the loop in it, and a return.
    monkeypatch.setattr(loops, "MAX_OPERATIONS", 20 * 6)
    assert unrolled(first="%zero", most=most).count("stablehlo.while") == loops_left

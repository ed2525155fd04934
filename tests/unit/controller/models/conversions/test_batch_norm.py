"""The gradient of batch normalization, taken apart for IREE: compiled and computed."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.models.conversions.tensorflow_program import prepare

STEP = """
func.func @step(%x: {x}, %scale: {c}, %mean: {c}, %variance: {c}, %dy: {x}) -> ({x}, {c}, {c}) {{
  %0:3 = "stablehlo.batch_norm_grad"(%x, %scale, %mean, %variance, %dy) {{epsilon = 0.1 : f32, feature_index = {axis}}}
    : ({x}, {c}, {c}, {c}, {x}) -> ({x}, {c}, {c})
  return %0#0, %0#1, %0#2 : {x}, {c}, {c}
}}
"""


@pytest.mark.ci
@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 5, 4), 3), ((2, 4, 3), 1)])
def test_batch_norm_grad_matches_stablehlo_specification(shape, axis):
    compiler, runtime = pytest.importorskip("iree.compiler"), pytest.importorskip("iree.runtime")
    tensor = f"tensor<{'x'.join(map(str, shape))}xf32>"
    text = prepare(STEP.format(x=tensor, c="tensor<4xf32>", axis=axis))
    assert '"stablehlo.batch_norm_grad"' not in text
    flags = ["--iree-llvmcpu-target-cpu=generic"]
    program = compiler.compile_str(text, target_backends=["llvm-cpu"], input_type="stablehlo", extra_args=flags)
    context = runtime.SystemContext(config=runtime.Config("local-sync"))
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, program))
    random = np.random.default_rng(0)
    x, dy = (random.normal(size=shape).astype(np.float32) for _ in range(2))
    scale, mean, variance = (random.random(4, np.float32) for _ in range(3))
    dx, dscale, doffset = (one.to_host() for one in context.modules.module.step(x, scale, mean, variance, dy))

    others = tuple(number for number in range(len(shape)) if number != axis)
    per_channel = [4 if number == axis else 1 for number in range(len(shape))]
    inverse = 1 / np.sqrt(variance + 0.1)
    normal = (x - mean.reshape(per_channel)) * inverse.reshape(per_channel)
    count = x.size / 4
    np.testing.assert_allclose(doffset, dy.sum(others), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dscale, (dy * normal).sum(others), rtol=1e-4, atol=1e-5)
    along = normal * dscale.reshape(per_channel)
    expected = (scale * inverse).reshape(per_channel) * (dy - (doffset.reshape(per_channel) + along) / count)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5)


def test_prepare_leaves_module_without_batch_norm_grad():
    pytest.importorskip("iree.compiler")
    text = "func.func @step(%x: tensor<2xf32>) -> tensor<2xf32> {\n  return %x : tensor<2xf32>\n}"
    assert "func.call" not in prepare(text) and "return" in prepare(text)

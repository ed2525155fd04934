"""The energy of the tokens of a generation, compared with the true energy of the simulated meter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.decoder import DECODER

from hil.controller.cli.running.bench import bench
from hil.controller.devices.metering.energy import EnergyWindow
from hil.controller.devices.metering.simulated_meter import SimulatedMeter
from hil.controller.pipeline import energy

IDLE_W, STEP_W, PROMPT_W = 2.0, 5.0, 8.0
PROMPT, STEPS, PACE_S = [84, 104, 101], 4, 0.05
# A prompt takes PACE_S and needs 20 samples.
METERED = f"""
[board]
name = "metered"
hw_type = "sim"

[simulator]

[meter]
kind = "simulated"
rate_hz = 1000
idle_s = 0.5

[meter.options]
idle_w = {IDLE_W}
active_w = {STEP_W}
prompt_w = {PROMPT_W}
noise_w = 0.2
"""


def integrate(meter: SimulatedMeter, windows: Sequence[EnergyWindow]) -> float:
    """Return the true energy of a unit above idle, by a sum over microseconds."""
    joules = 0.0
    for start, end in (part for one in windows for part in one.ranges):
        watts = meter.compute_watts(np.arange(start, end, 1000))
        joules += float((watts - IDLE_W).mean()) * (end - start) / 1e9
    return joules / sum(one.units for one in windows)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run `hil bench` of a decoder. Return its record, the meter, and the windows of prompts and steps."""
    found: dict[str, Any] = {}
    stop, add_tokens = SimulatedMeter.stop, energy.add_tokens

    def keep_meter(meter: SimulatedMeter) -> None:
        found["meter"] = meter
        stop(meter)

    def keep_windows(measurement, samples, prompts, steps, idle, **more):
        found.update(prompts=prompts, steps=steps)
        return add_tokens(measurement, samples, prompts, steps, idle, **more)

    monkeypatch.setattr(SimulatedMeter, "stop", keep_meter)
    monkeypatch.setattr(energy, "add_tokens", keep_windows)
    for name in ("HOME", "HIL_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    Path("metered.toml").write_text(METERED)
    Path("prompts.toml").write_text(f"steps = {STEPS}\n[[prompt]]\ntokens = {PROMPT}\n")
    words = [str(DECODER / "decoder.onnx"), "--generate", "prompts.toml", "--runtime", "onnxruntime", "--json"]
    more = ["--board", "metered.toml", "--fault", f"pace:seconds={PACE_S}", "--iterations", "2", "--energy"]
    ended = CliRunner().invoke(bench, [*words, *more], standalone_mode=False, catch_exceptions=False)
    return {**found, "record": json.loads(ended.stdout)}


@pytest.mark.ci
def test_energy_of_tokens_error_is_below_two_percent(measured):
    (side,) = measured["record"]["sides"]
    found, meter = side["energy"], measured["meter"]
    assert (found["refused"], found["token_reason"]) == (None, "")
    for name, watts, tokens in (
        ("prompts", PROMPT_W, len(PROMPT)),
        ("steps", STEP_W, STEPS),
    ):
        windows = measured[name]
        one = found["per_prompt_token" if name == "prompts" else "per_generated_token"]
        true = integrate(meter, windows)
        assert one["joules"] == pytest.approx(true, rel=0.02)
        assert one["interval"]["low"] <= one["joules"] <= one["interval"]["high"]
        # The windows contain exactly the calls of their tokens.
        assert sum(window.units for window in windows) == tokens * found["inferences"]
        seconds = sum(window.length_s for window in windows)
        assert true == pytest.approx((watts - IDLE_W) * seconds / sum(window.units for window in windows), rel=0.02)
        assert seconds >= found["inferences"] * PACE_S * (1 if name == "prompts" else STEPS)
    whole = len(PROMPT) * found["per_prompt_token"]["joules"] + STEPS * found["per_generated_token"]["joules"]
    assert found["per_inference"]["joules"] == pytest.approx(whole, rel=0.05)

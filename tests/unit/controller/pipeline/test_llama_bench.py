"""The times of generations in the format of llama-bench."""

from __future__ import annotations

import pytest
from support.generations import TIMES, stored_generation
from support.run_records import run_case, run_record

from hil.controller.pipeline.records.llama_bench import list_llama_bench_rows
from hil.errors import UsageError

# Fields that llama.cpp's compare-llama-bench.py requires.
REQUIRED = {
    *("cpu_info", "gpu_info", "backends", "n_gpu_layers", "tensor_buft_overrides", "model_filename", "model_type"),
    *("n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict", "poll", "n_threads", "type_k", "type_v"),
    *("use_mmap", "no_kv_offload", "split_mode", "main_gpu", "tensor_split", "flash_attn", "n_prompt", "n_gen"),
    *("n_depth", "build_commit", "test_time", "avg_ts"),
}


def test_run_has_row_for_prompt_and_row_for_steps():
    prompt, steps = list_llama_bench_rows(run_record(run_case(generation=stored_generation())))
    assert set(prompt) >= REQUIRED and set(steps) == set(prompt)
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_depth"]) == (3, 0, 0)
    assert (prompt["avg_ns"], prompt["stddev_ns"]) == (3_000_000, 1_414_214)
    assert prompt["samples_ts"] == pytest.approx([1500, 750]) and prompt["avg_ts"] == pytest.approx(1125)
    assert (steps["n_prompt"], steps["n_gen"], steps["n_depth"]) == (0, 2, 3)
    assert steps["samples_ns"] == [1_000_000, 1_000_000]
    assert (steps["avg_ts"], steps["stddev_ts"]) == pytest.approx((2000, 0))


def test_generation_without_steps_has_no_row_for_steps():
    times = {**TIMES, "steps": 0, "decode_ns": [], "step_ns": [], "prefill_ns": [1_000_000]}
    (row,) = list_llama_bench_rows(run_record(run_case(generation=stored_generation(times=times))))
    assert (row["n_gen"], row["stddev_ns"]) == (0, 0)


@pytest.mark.parametrize("generation", [None, stored_generation(times=None)])
def test_run_without_times_is_rejected(generation: object):
    with pytest.raises(UsageError, match="has no timed generations"):
        list_llama_bench_rows(run_record(run_case(generation=generation)))

"""Convert the times of generations to llama-bench's JSON format, for tools and dashboards that read this format."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.controller.records.measurements.generation import StoredGeneration
from hil.controller.records.run import RunCase, RunRecord
from hil.core.steps import TURN_END
from hil.errors import UsageError

# llama.cpp's settings that hil does not have. Scripts for llama-bench require all fields.
_UNKNOWN: dict[str, Any] = {
    "build_number": 0,
    "model_n_params": 0,
    "n_threads": 0,
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 0,
    "type_k": "",
    "type_v": "",
    "n_gpu_layers": 0,
    "split_mode": "none",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": False,
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "use_mmap": False,
    "embeddings": False,
    "no_op_offload": 0,
}


def list_llama_bench_rows(record: RunRecord) -> list[dict[str, Any]]:
    """Return llama-bench's rows for a run: prompt processing and token generation of each case.

    Raises UsageError if the run has no timed generation.
    """
    found = [row for case in record.cases for row in _list_rows(record, case)]
    if not found:
        raise UsageError(f"run {record.id} has no timed generations", hint="hil run MODEL --generate SPEC")
    return found


def _list_rows(record: RunRecord, case: RunCase) -> Iterator[dict[str, Any]]:
    generation = case.generation
    if generation is None or generation.times is None or TURN_END in generation.prompt_tokens:
        return  # llama-bench has no conversations
    shared, times = _describe_case(record, case, generation), generation.times
    prompt, steps = len(generation.prompt_tokens), len(times.step_ns)
    if any(times.prefill_ns):
        yield {**shared, "n_prompt": prompt, "n_gen": 0, "n_depth": 0, **_summarize(times.prefill_ns, prompt)}
    if any(times.decode_ns):
        yield {**shared, "n_prompt": 0, "n_gen": steps, "n_depth": prompt, **_summarize(times.decode_ns, steps)}


def _describe_case(record: RunRecord, case: RunCase, generation: StoredGeneration) -> dict[str, Any]:
    artifact, provenance = case.artifact, case.provenance
    batch = generation.chunk or len(generation.prompt_tokens)
    commit = record.origin.commit[:8] if record.origin else ""
    return {
        **_UNKNOWN,
        "build_commit": commit or record.id,
        "cpu_info": str(provenance.machine.get("cpu_model", "")) if provenance else "",
        "gpu_info": "",
        "backends": f"{provenance.runtime} {provenance.runtime_version} {provenance.device}" if provenance else "",
        "model_filename": case.path,
        "model_type": Path(case.path).stem,
        "model_size": artifact.bytes if artifact else 0,
        "n_batch": batch,
        "n_ubatch": batch,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
    }


def _summarize(samples_ns: Sequence[int], tokens: int) -> dict[str, Any]:
    known = [one for one in samples_ns if one]
    rates = [tokens / one * 1e9 for one in known]
    several = len(known) > 1
    return {
        "avg_ns": round(statistics.fmean(known)),
        "stddev_ns": round(statistics.stdev(known)) if several else 0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if several else 0.0,
        "samples_ns": known,
        "samples_ts": rates,
    }

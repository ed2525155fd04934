"""Measure token generation with the agent, relative to a plain loop over the same program in ONNX Runtime.

Both loops pass the cache of a step to the next step, and choose the token with the largest logit. The plain loop runs
in this process. There are two decoders: the decoder of examples/decoder, and a similar decoder with random weights,
whose steps take several milliseconds. A program without computation shows the overhead of a step for different cache
sizes. Other load on the machine increases the times, but hardly the CPU time of the generating process.

llama.cpp runs the same weights as GGUF through xllamacpp, in a separate environment. Its time of a step includes
choosing the token, like hil's time in this benchmark.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks import common
from hil.controller.devices.board_client import Invocation
from hil.controller.models.generation.roles import detect_roles
from hil.controller.models.generation.spec import GenerateSpec, Prompt
from hil.core.steps import FORCED, OTHER_PROMPT, PROMPT, StepsPlan
from hil.core.tensors import Array

EXAMPLE = common.HERE.parent / "examples" / "decoder" / "make.py"
PROMPT_TOKENS, STEPS = 64, 32
MIB = 1 << 20
# Layers, hidden size and FFN size of the larger decoder.
LARGE = 8, 512, 1408
LLAMA = ("xllamacpp==2026.10.*", "gguf==0.19.*", "numpy")


def make_decoder(path: Path, large: bool) -> Path:
    """Write the decoder of the example, or a larger decoder with random weights.

    Write the weights to an .npz file next to it.
    """
    example = runpy.run_path(str(EXAMPLE))
    weights: dict[str, Any] = example["load_weights"]()
    if large:
        layers, hidden, ffn = LARGE
        vocabulary, rng = len(weights["embedding"]), np.random.default_rng(0)
        shapes = {"embedding": (vocabulary, hidden), "norm": (hidden,), "head": (hidden, vocabulary)}
        for layer in range(layers):
            sizes = {
                "query": hidden,
                "key": hidden // 2,
                "value": hidden // 2,
                "gate": ffn,
                "up": ffn,
                "output": hidden,
            }
            shapes |= {f"layers.{layer}.{name}": (hidden, size) for name, size in sizes.items()}
            shapes |= {f"layers.{layer}.{name}": (hidden,) for name in ("attention_norm", "ffn_norm")}
            shapes[f"layers.{layer}.down"] = (ffn, hidden)
        weights = {name: rng.normal(size=shape).astype(np.float32) / 20 for name, shape in shapes.items()}
    onnx.save(example["Decoder"](weights).build(), path)
    np.savez(path.with_suffix(".npz"), **weights)
    return path


def make_copy(path: Path, size: int) -> Path:
    """Write a program without computation: the logits are a constant, and a cache of ``size`` bytes is copied."""
    shape = [1, max(size // 256, 1), 64, 1]  # 64 positions
    value = helper.make_tensor_value_info
    inputs = [value("input_ids", TensorProto.INT64, [1, "s"]), value("past.0.key", TensorProto.FLOAT, shape)]
    outputs = [
        value("logits", TensorProto.FLOAT, [1, "s", 1]),
        value("present.0.key", TensorProto.FLOAT, shape),
    ]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["ids", "axes"], ["logits"]),
        helper.make_node("Identity", ["past.0.key"], ["present.0.key"]),
    ]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [2])
    graph = helper.make_graph(nodes, "copy", inputs, outputs, [axes])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@dataclass
class Generation:
    """Duration of the prompt's call and of each step, and the total CPU time, in nanoseconds; 0 if unknown."""

    prompt: int
    steps: Sequence[int]
    cpu: int = 0


def run_bare(session: ort.InferenceSession, prompt: Sequence[int], shapes: dict[str, Sequence[int]]) -> Generation:
    """Generate tokens in this process."""
    cpu = time.process_time_ns()
    cache: dict[str, Array] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    names = [one.name for one in session.get_inputs()]
    tokens, position, times = list(prompt), 0, []
    for _ in range(STEPS + 1):
        begun = time.perf_counter_ns()
        total = position + len(tokens)
        feeds: dict[str, Any] = {"input_ids": np.array([tokens], np.int64), **cache}
        if "attention_mask" in names:
            feeds["attention_mask"] = np.ones((1, total), np.int64)
            feeds["position_ids"] = np.arange(position, total)[None]
        logits, *present = session.run(None, feeds)
        cache = dict(zip(shapes, present, strict=True))
        tokens, position = [int(np.argmax(logits[0, -1]))], total
        times.append(time.perf_counter_ns() - begun)
    return Generation(times[0], times[1:], time.process_time_ns() - cpu)


def read_generation(done: Invocation) -> Generation:
    """Return the times of the agent's calls, including the choice of tokens."""
    starts = [call.start_ns for call in done.calls]
    ends = [*starts[1:], done.iterations_ns[-1][1]]
    times = [end - start for start, end in zip(starts, ends, strict=True)]
    return Generation(times[0], times[1:], done.cpu_ns)


def run_llama(peer: common.Peer, prompt: Sequence[int]) -> Generation:
    """Generate tokens in llama.cpp, which reports only the mean time of steps."""
    done = peer(prompt=prompt, steps=STEPS)
    return Generation(round(done["prompt_ms"] * 1e6), [round(done["step_ms"] * 1e6)])


def measure(
    client: Any, path: Path, rounds: int, prompt_tokens: int, llama: common.Peer | None = None
) -> tuple[dict[str, list[float]], ...]:
    """Return case -> values of each round: seconds per token, seconds to the first token, and CPU seconds."""
    loaded = common.load(client, path, runtime="onnxruntime")
    spec = GenerateSpec(prompt=[Prompt(tokens=[1])], steps=STEPS)
    plan: StepsPlan = detect_roles(loaded.inputs, loaded.outputs, spec).plan
    prompt = [int(one) for one in np.random.default_rng(1).integers(1, 127, prompt_tokens)]
    empty = np.empty(0, np.int64)
    inputs = {PROMPT: np.array(prompt, np.int64), FORCED: empty, OTHER_PROMPT: empty}
    session = ort.InferenceSession(path)
    shapes = {loaded.inputs[place].name: shape for (place, _), shape in zip(plan.feedback, plan.shapes, strict=True)}
    runs: dict[str, Callable[[], Generation]] = {
        "hil": lambda: read_generation(client.invoke(loaded.program_id, inputs, steps=plan)),
        "bare": lambda: run_bare(session, prompt, shapes),
    }
    if llama is not None:
        runs["llama"] = lambda: run_llama(llama, prompt)
    first: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}

    def seconds(name: str) -> list[float]:
        done = runs[name]()
        first[name].append(done.prompt / 1e9)
        cpu[name].append(done.cpu / 1e9)
        return [statistics.median(done.steps) / 1e9]

    token = common.interleave({name: lambda name=name: seconds(name) for name in runs}, rounds)  # type: ignore[misc]
    client.unload(loaded.program_id)
    return token, *({name: times[1:] for name, times in one.items()} for one in (first, cpu))


def llama_peer(path: Path, notes: list[str]) -> contextlib.AbstractContextManager[common.Peer | None]:
    """Start llama.cpp with the weights of a decoder. If that fails, add a note and yield None."""
    argv = ["llama_peer.py", str(path.with_suffix(".npz")), str(path.parent), str(2 * (PROMPT_TOKENS + STEPS))]
    return common.rival_peer("llama.cpp", "llama", LLAMA, argv, notes)


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=15)
    cores = len(os.sched_getaffinity(0))
    notes = [f"a prompt of {PROMPT_TOKENS} tokens, then {STEPS} steps; ONNX Runtime {ort.__version__}, {cores} threads"]
    rows = []
    with common.session() as (client, _, folder):
        for name, large in (("0.2 M parameters", False), ("25 M parameters", True)):
            path = make_decoder(folder / f"decoder-{large}.onnx", large)
            with llama_peer(path, notes) as llama:
                token, first, cpu = measure(client, path, asked.rounds, PROMPT_TOKENS, llama)
            bars = ("<= 1.02", "<= 1.03") if large else ("", "")
            for what, got, bar in (("time per token", token, bars[0]), ("time to first token", first, bars[1])):
                rows.append(common.beside(f"{what}, {name}", got["hil"], "bare loop", got["bare"], 1e3, "ms", bar))
                if "llama" in got:
                    rows.append(common.beside(f"{what}, {name}", got["hil"], "llama.cpp", got["llama"], 1e3, "ms", ""))
            case = f"CPU time of a generation, {name}"
            rows.append(common.beside(case, cpu["hil"], "bare loop", cpu["bare"], 1e3, "ms", bars[0]))
        for size in (0, MIB, 8 * MIB):
            token, *_ = measure(client, make_copy(folder / f"copy-{size}.onnx", size), asked.rounds, 1)
            case = f"a step without work, cache of {size / MIB:g} MiB"
            rows.append(common.beside(case, token["hil"], "bare loop", token["bare"], 1e6, "us", ""))
    common.show("generate", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()

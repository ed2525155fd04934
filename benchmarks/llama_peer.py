"""Serve llama.cpp as a rival in a separate environment: a decoder as a GGUF file, through xllamacpp.

``argv``: a file with weights (.npz), a temporary directory, and the number of positions. Reads orders from stdin and
prints replies, one JSON document per line. ``{"prompt": [...], "steps": N}`` -> milliseconds of the prompt and of a
step, and the tokens.
"""

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

HEAD_SIZE, ROPE_THETA, NORM_EPSILON = 16, 10000.0, 1e-6
TENSORS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
TOP = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}


def write_gguf(weights: dict[str, np.ndarray], path: Path, positions: int) -> None:
    """Write a Llama model in float32.

    In GGUF, matrices are [out, in], and the two elements of a rotation pair are adjacent.
    """
    vocabulary, hidden = weights["embedding"].shape
    layers = sum(name.endswith(".query") for name in weights)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(positions)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(weights["layers.0.gate"].shape[1])
    writer.add_head_count(weights["layers.0.query"].shape[1] // HEAD_SIZE)
    writer.add_head_count_kv(weights["layers.0.key"].shape[1] // HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>" for token in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    for name, weight in weights.items():
        array = np.ascontiguousarray(weight.T, np.float32)
        if name.endswith((".query", ".key")):
            pairs = array.reshape(-1, 2, HEAD_SIZE // 2, hidden)
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        if name == "embedding":
            array = np.ascontiguousarray(weight, np.float32)
        part = name.split(".")
        writer.add_tensor(TOP.get(name) or f"blk.{part[1]}.{TENSORS[part[2]]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def start_server(path: Path, positions: int) -> xllamacpp.Server:
    """Load a model with the defaults of llama-bench, but with a float32 cache like hil's decoders."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = params.n_batch = params.n_ubatch = positions
    params.n_parallel = 1
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def main() -> None:
    """Serve orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of llama.cpp must not look like a reply
    folder, positions = Path(sys.argv[2]), int(sys.argv[3])
    with np.load(sys.argv[1]) as file:
        write_gguf(dict(file), folder / "model.gguf", positions)
    server = start_server(folder / "model.gguf", positions)
    print(json.dumps({"xllamacpp": version("xllamacpp")}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        found = server.handle_completions(
            {
                "prompt": order["prompt"],
                "n_predict": order["steps"] + 1,
                "temperature": 0,
                "top_k": 1,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        times = found["timings"]
        # llama.cpp starts the time of the steps after the first token.
        step_ms = times["predicted_ms"] / max(times["predicted_n"] - 1, 1)
        tokens = [int(token) for token in re.findall(r"<(\d+)>", found["choices"][0]["text"])]
        said = {"prompt_ms": times["prompt_ms"], "step_ms": step_ms, "tokens": tokens}
        print(json.dumps(said), file=answers, flush=True)
    os._exit(0)  # exit despite the server's threads


if __name__ == "__main__":
    main()

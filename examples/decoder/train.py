"""Train the decoder on hil's guides and write weights.npz: `python examples/decoder/train.py`.

Needs PyTorch. Takes two to four minutes on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]

SEED = 0
STEPS = 1000
BATCH = 16
WINDOW = 128  # tokens of a training sequence, at positions 0 to 127
LEARNING_RATE = 4e-3
WARM_UP = 50  # steps

VOCABULARY = 128  # ASCII
HIDDEN = 64
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 16
FFN = 176
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6


def load_text() -> np.ndarray:
    """Return the guides and the license as token ids, int64 [n]. Characters outside ASCII become "?"."""
    files = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "LICENSE"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)


def init_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random weights, float32. A matrix is [in, out]: its layer computes `x @ weight`."""

    def normal(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * scale / np.sqrt(rows)).astype(np.float32)

    residual = (2 * LAYERS) ** -0.5  # the sum of all layers then has the variance of the embedding
    weights = {"embedding": (rng.standard_normal((VOCABULARY, HIDDEN)) * 0.1).astype(np.float32)}
    for n in range(LAYERS):
        layer = {
            "attention_norm": np.ones(HIDDEN, np.float32),
            "query": normal(HIDDEN, HEADS * HEAD_SIZE),
            "key": normal(HIDDEN, KV_HEADS * HEAD_SIZE),
            "value": normal(HIDDEN, KV_HEADS * HEAD_SIZE),
            "output": normal(HEADS * HEAD_SIZE, HIDDEN, residual),
            "ffn_norm": np.ones(HIDDEN, np.float32),
            "gate": normal(HIDDEN, FFN),
            "up": normal(HIDDEN, FFN),
            "down": normal(FFN, HIDDEN, residual),
        }
        weights |= {f"layers.{n}.{name}": value for name, value in layer.items()}
    return weights | {"norm": np.ones(HIDDEN, np.float32), "head": normal(HIDDEN, VOCABULARY)}


def normalize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019)."""
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt() * scale


def rotate(x: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al. 2021) of [batch, heads, sequence, head]. Pairs are half a head apart, as in Llama."""
    import torch

    half = HEAD_SIZE // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[2])[:, None] * frequency
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def forward(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [batch, sequence, vocabulary] of token ids [batch, sequence]."""
    from torch.nn import functional

    def split(x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*ids.shape, heads, HEAD_SIZE).transpose(1, 2)

    x = weights["embedding"][ids]
    for n in range(LAYERS):
        layer = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"layers.{n}.")}
        h = normalize(x, layer["attention_norm"])
        query, key = rotate(split(h @ layer["query"], HEADS)), rotate(split(h @ layer["key"], KV_HEADS))
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(HEADS // KV_HEADS, 1),
            split(h @ layer["value"], KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1),
            is_causal=True,
        )
        x = x + mixed.transpose(1, 2).reshape(*ids.shape, -1) @ layer["output"]
        h = normalize(x, layer["ffn_norm"])
        x = x + (functional.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return normalize(x, weights["norm"]) @ weights["head"]


def train(text: np.ndarray) -> dict[str, np.ndarray]:
    """Return weights trained with AdamW, float16. The learning rate falls to zero along half a cosine."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    rng = np.random.default_rng(SEED)
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in init_weights(rng).items()}
    optimizer = torch.optim.AdamW(weights.values(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (1 + np.cos(np.pi * step / STEPS)) / 2
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        starts = rng.integers(0, len(text) - WINDOW, BATCH)
        ids = torch.from_numpy(np.stack([text[start : start + WINDOW + 1] for start in starts]))
        loss = functional.cross_entropy(forward(weights, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return {name: value.detach().numpy().astype(np.float16) for name, value in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "weights.npz", metavar="OUT.npz")
    np.savez_compressed(parser.parse_args().out, **train(load_text()))


if __name__ == "__main__":
    main()

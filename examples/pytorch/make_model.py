"""A small vision transformer with seeded weights, exported: ``python make_model.py`` writes ``model.pt2``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, PATCH = 32, 4, 4


class Attention(nn.Module):
    """Self-attention of (batch, places, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        batch, places, _ = x.shape
        q, k, v = self.qkv(x).view(batch, places, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = functional.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, places, WIDTH))
        return projected


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = x + self.attn(self.norm1(x))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class Classifier(nn.Module):
    """Ten scores for images of 3x16x16."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Scores of (batch, 10)."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return {"scores": self.head(x.mean(1))}


def main() -> None:
    """Write the model."""
    torch.manual_seed(0)
    module = Classifier().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (torch.randn(2, 3, 16, 16),), dynamic_shapes={"image": {0: batch}})
    torch.export.save(program, Path(sys.argv[1] if len(sys.argv) > 1 else "model.pt2"))


if __name__ == "__main__":
    main()

"""A small CNN with seeded weights, exported, and as stock ExecuTorch bundles it.

``python make_program.py`` writes ``cnn.pt2`` (torch.export), ``cnn.pte`` (lowered for XNNPACK) and ``cnn.bpte`` (the
same with three test cases of PyTorch's own answers).
"""

from __future__ import annotations

from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.devtools import BundledProgram
from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn


class Cnn(nn.Module):
    """Ten scores for an image of 3x16x16."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU())
        self.head = nn.Linear(16 * 5 * 5, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of (1, 10), from 0 to 1."""
        scores: Tensor = torch.special.expit(self.head(self.body(image).flatten(1)))
        return scores


def main() -> None:
    """Write the three files."""
    torch.manual_seed(0)
    module = Cnn().eval()
    images = [torch.randn(1, 3, 16, 16) for _ in range(3)]
    exported = torch.export.export(module, (images[0],))
    torch.export.save(exported, "cnn.pt2")
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    Path("cnn.pte").write_bytes(program.buffer)
    with torch.no_grad():
        cases = [MethodTestCase([image], [module(image)]) for image in images]
    bundle = BundledProgram(program, [MethodTestSuite("forward", cases)])
    Path("cnn.bpte").write_bytes(serialize_from_bundled_program_to_flatbuffer(bundle))


if __name__ == "__main__":
    main()

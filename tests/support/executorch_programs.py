"""Small PyTorch programs for the tests of ExecuTorch, and the results of ExecuTorch's own tools for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Linear(nn.Module):
    """Compute two outputs from one input: [2, 4] to [2, 3] and [2, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.fc(x)), x + 1


class Kinds(nn.Module):
    """Take numbers, which become constants of the program. Some of the outputs are not tensors."""

    def forward(self, x: torch.Tensor, factor: int, shift: float, negate: bool) -> Any:
        y = x * factor + shift
        return (-y if negate else y), None, factor, x.to(torch.bfloat16), x > 0, x.to(torch.int64)


class Conv(nn.Module):
    """[n, 3, 8, 8] to [n, 8, 6, 6]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


class Residual(nn.Module):
    """Three 3x3 convolutions with ReLU and a skip, pooling, a dense layer: [1, 3, 16, 16] to [1, 10]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = nn.Conv2d(3, 16, 3, 1, 1), *(nn.Conv2d(16, 16, 3, 1, 1) for _ in "ab")
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(image)))
        x = torch.relu(x + self.third(torch.relu(self.second(x))))
        return self.fc(x.mean((2, 3)))


class Mlp(nn.Module):
    """Four dense layers, softmax at the end: [4, 64] to [4, 8]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [64, 128, 128, 64, 8]
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*[one for pair in layers for one in pair][:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layers(x), -1)


class Attention(nn.Module):
    """Transformer block: [1, 16, 32] to [1, 16, 32]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(1, 2) / 32**0.5, -1)
        x = x + self.out(scores @ v)
        return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))


NETS = {
    "residual": (Residual, (1, 3, 16, 16)),
    "mlp": (Mlp, (4, 64)),
    "attention": (Attention, (1, 16, 32)),
}


def export(module: nn.Module, inputs: Sequence[Any], dynamic_shapes: Any = None) -> Any:
    """Return the exported program of a module in evaluation mode."""
    return torch.export.export(module.eval(), tuple(inputs), dynamic_shapes=dynamic_shapes)


def save_pt2(path: Path, program: Any) -> Path:
    """Write an exported program as a .pt2 file."""
    torch.export.save(program, path)
    return path


def lower(program: Any, *, portable: bool = False) -> Any:
    """Lower an exported program with the original ExecuTorch."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    return to_edge_transform_and_lower(program, partitioner=[] if portable else [XnnpackPartitioner()]).to_executorch()


def save_pte(path: Path, program: Any, *, portable: bool = False) -> Path:
    """Lower an exported program with the original ExecuTorch, and write it as a .pte file."""
    path.write_bytes(lower(program, portable=portable).buffer)
    return path


def save_bpte(path: Path, program: Any, cases: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> Path:
    """Write a bundle with the original ExecuTorch. Each case consists of inputs and expected outputs."""
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer

    suite = MethodTestSuite("forward", [MethodTestCase(list(given), list(expected)) for given, expected in cases])
    path.write_bytes(serialize_from_bundled_program_to_flatbuffer(BundledProgram(lower(program), [suite])))
    return path


def stock_verdict(path: Path, case: int, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether ExecuTorch's own verifier accepts a case of a .bpte file."""
    from executorch.extension.pybindings import _C

    data = path.read_bytes()  # The library reads this value later.
    bundle = _C._load_bundled_program_from_buffer(data)
    try:
        bundle.verify_result_with_bundled_expected_output("forward", case, rtol, atol)
    except RuntimeError:
        return False
    return True

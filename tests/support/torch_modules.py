"""PyTorch modules for tests. This module imports torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Nested(nn.Module):
    """Take a dict and a list. Return a dict with a list and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Any, extra: Any, scale: float = 2.0) -> Any:
        return {"y": self.fc(x) * scale, "rest": [extra["a"] + 1, 7, extra["b"][0]]}


class Net(nn.Module):
    """Convolution with batch norm, a submodule with its own layers, and functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        scores: torch.Tensor = self.head(mixed)
        return torch.softmax(scores, -1)


class Recurrent(nn.Module):
    """LSTM that takes its state as input, and returns it with the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, state = self.lstm(x, state)
        return {"y": y, "state": state}


class Counting(nn.Module):
    """Buffer that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.seen


class Keeping(nn.Module):
    """Module without outputs. It adds to a buffer with a nonzero initial value, and writes to an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("total", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        self.inner.total.add_(x)
        kept.copy_(x * 2)


class Branching(nn.Module):
    """Control flow that depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


class Conjugate(nn.Module):
    """Operator that torch-mlir imports and IREE does not support."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.conj()


def save(path: Path, module: nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> Path:
    """Export a module, in inference mode, and save it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Warning of torch about its own LSTM.
        program = torch.export.export(module.eval(), args, kwargs or None, dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return path


def save_net(path: Path) -> Path:
    """Save :class:`Net` with seeded weights, for any batch size up to 8."""
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=8)
    return save(path, Net(), torch.randn(2, 3, 8, 8), dynamic=({0: batch},))

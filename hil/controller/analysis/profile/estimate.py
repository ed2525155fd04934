"""What a model's nodes must compute and move at the least, told from its shapes alone: estimates, no measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hil.controller.analysis.profile.estimate_build import read
from hil.controller.analysis.profile.estimate_ops import PICKING, VIEWS
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, IsolatedError, IsolatedTimeout
from hil.controller.storage.versions import version
from hil.core.artifacts import Model
from hil.errors import ImportFailed, StageTimeout

# Operations a byte at which computing takes as long as moving. A core that does a vector's multiply-add a cycle or two
# makes 8 to 64 of them in float32, and gets 1 to 6 bytes from memory meanwhile: ten, give or take a factor of two, of
# a Cortex-A53 (8 to 1) as of a core of a server. A board of another kind (an accelerator: hundreds) needs its own.
RIDGE = 10.0
_FILE = "shapes.json"
# Raise this when what is read out of a model changes.
_VERSION = 1


@dataclass(frozen=True)
class Estimate:
    """Of some operations together: what goes from one of them to another is not counted as moved.

    Attributes:
        flops: operations; None where one is unknown.
        bytes: inputs, weights and outputs, each once; None where one is unknown.
        shapes: of inputs and outputs, as in :class:`~hil.core.timeline.OpRow`.
        ridge: see :data:`RIDGE`.
    """

    flops: int | None
    bytes: int | None
    shapes: str = ""
    ridge: float = RIDGE

    @property
    def intensity(self) -> float | None:
        """Operations a byte."""
        return self.flops / self.bytes if self.flops is not None and self.bytes else None

    @property
    def bound(self) -> str:
        """``compute`` or ``memory``: what should limit it; "" where unknown."""
        if self.intensity is None:
            return ""
        return "compute" if self.intensity >= self.ridge else "memory"


@dataclass(frozen=True)
class Node:
    """A node, as far as estimates need it: its values by name, and its operations where they are known."""

    name: str
    op_type: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    flops: int | None


@dataclass(frozen=True)
class Estimates:
    """Of a whole model.

    Attributes:
        nodes: name -> node, in the model's order, those of subgraphs too.
        values: name -> (type as ``1x64xf32``, bytes), where the shape is known.
        results: the model's outputs.
        ridge: see :data:`RIDGE`.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    values: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    results: frozenset[str] = frozenset()
    ridge: float = RIDGE

    def of(self, names: Iterable[str]) -> Estimate:
        """The estimate of these nodes together; names of no node are passed over."""
        nodes = [self.nodes[name] for name in dict.fromkeys(names) if name in self.nodes]
        if not nodes:
            return Estimate(None, None, ridge=self.ridge)
        own = {name for node in nodes for name in node.outputs}
        ins = list(dict.fromkeys(name for node in nodes for name in node.inputs if name not in own))
        inside = {node.name for node in nodes}
        outs = [
            name
            for node in nodes
            for name in node.outputs
            if name and (name in self.results or any(user not in inside for user in self._users.get(name, ())))
        ]
        flops = [node.flops for node in nodes]
        return Estimate(
            None if None in flops else sum(count for count in flops if count is not None),
            self._bytes(nodes, ins, outs),
            f"{self._shapes(ins)} -> {self._shapes(outs)}" if ins or outs else "",
            self.ridge,
        )

    @cached_property
    def _users(self) -> Mapping[str, list[str]]:
        users: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for name in node.inputs:
                users.setdefault(name, []).append(node.name)
        return users

    def _bytes(self, nodes: Sequence[Node], ins: Sequence[str], outs: Sequence[str]) -> int | None:
        if all(node.op_type in VIEWS for node in nodes):
            return 0
        if any(name not in self.values for name in (*ins, *outs)):
            return None
        moved = {name: self.values[name][1] for name in (*ins, *outs)}
        for node in nodes:
            if node.op_type in PICKING and node.inputs and node.inputs[0] in moved:
                written = sum(self.values[name][1] for name in node.outputs if name in self.values)
                moved[node.inputs[0]] = min(moved[node.inputs[0]], written)
        return sum(moved.values())

    def _shapes(self, names: Sequence[str]) -> str:
        return ", ".join(self.values[name][0] if name in self.values else "?" for name in names)


def estimate(
    model: Model, *, cache: Cache, isolated: Isolated, timeout: float | None, log: Path, ridge: float = RIDGE
) -> Estimates:
    """Estimate an ONNX model's nodes; of other models there are none.

    Args:
        model: the model, its symbolic dimensions as ``model.dims`` says.
        cache: where what was read is kept.
        isolated: where the model is read.
        timeout: seconds that it may take.
        log: what it prints is appended here.
        ridge: operations a byte at which computing takes as long as moving.

    Raises:
        ImportFailed, StageTimeout: the model cannot be read.
    """
    if model.format != "onnx":
        return Estimates(ridge=ridge)

    def make(folder: Path) -> None:
        arguments = {"model": str(model.path.absolute()), "dims": dict(model.dims)}
        try:
            found = isolated.call(read, arguments, timeout=timeout, log=log)
        except IsolatedTimeout as error:
            raise StageTimeout(f"reading the model's shapes {error.message}", detail=error.detail) from error
        except IsolatedError as error:
            raise ImportFailed(f"the model's shapes cannot be read: {error.message}", detail=error.detail) from error
        (folder / _FILE).write_text(json.dumps(found))

    parts = {"model": model.digest, "dims": dict(model.dims), "onnx": version("onnx"), "version": _VERSION}
    entry, _ = cache.get_or_make(Cache.key("shapes", **parts), {"model": model.name, "what": "its shapes"}, make)
    document = json.loads((entry / _FILE).read_bytes())
    nodes = {node[0]: Node(*node) for node in document["nodes"]}
    values = {name: (told[0], told[1]) for name, told in document["values"].items()}
    return Estimates(nodes, values, frozenset(document["results"]), ridge)

"""Record why ExecuTorch's partitioners leave nodes to ExecuTorch's own kernels."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from hil.core.placement_reasons import MAX_REASON_CHARS, MAX_REASONS

_LOGGER = "executorch"
_UNREPORTED = "reason not reported by ExecuTorch"
# A line of Vulkan's partitioner, which logs to the root logger: the reason, then the node's name.
_VULKAN = re.compile(r"\[Vulkan Partitioner\] Due to \[(.*)\], skipping (\w+)", re.DOTALL)


class PartitionReasons(logging.Handler):
    """Collect the reasons that partitioners log while a program is lowered. Use as a context manager.

    Attributes:
        by_node: name of the node in the graph -> reason.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.by_node: dict[str, str] = {}

    def __enter__(self) -> PartitionReasons:
        """Log everything of ExecuTorch to this handler."""
        self._logger, self._root = logging.getLogger(_LOGGER), logging.getLogger()
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False  # the process's output would contain every debug message
        self._logger.addHandler(self)
        self._root.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the loggers."""
        self._root.removeHandler(self)
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]

    def emit(self, record: logging.LogRecord) -> None:
        """Take the reason from a message. Pass warnings on to the process's output."""
        from executorch.exir.backend.utils import WhyNoPartition

        if isinstance(record.msg, WhyNoPartition):
            if record.msg.node is not None:
                self.by_node[record.msg.node.name] = str(record.msg.reason)
        elif found := _VULKAN.match(str(record.msg)):
            self.by_node[found[2]] = found[1]
        elif record.levelno >= logging.WARNING and record.name.startswith(_LOGGER):
            for handler in self._root.handlers:
                if handler is not self:
                    handler.handle(record)


def explain_nodes(nodes: Iterable[tuple[str, str]], why: Mapping[str, str], backend: str) -> dict[str, dict[str, int]]:
    """Return the reasons of the nodes that a backend did not take: operator -> reason -> number of nodes.

    Operators without any reason are missing. Nodes without a reason, of an operator with reasons, have a text that says
    so: a program does not contain which of its calls is which node.

    Args:
        nodes: (name, operator) of each node that was not delegated.
        why: see :attr:`PartitionReasons.by_node`.
        backend: hil's name of the backend.
    """
    known = _list_known_operators(backend)
    found: dict[str, Counter[str]] = {}
    unreported: Counter[str] = Counter()
    for name, operator in nodes:
        reason = why.get(name, "")
        if not reason and known is not None and operator.partition(".")[2] not in known:
            reason = "XNNPACK's partitioner does not support this operator"
        if reason:
            found.setdefault(operator, Counter())[" ".join(reason.split())[:MAX_REASON_CHARS]] += 1
        else:
            unreported[operator] += 1
    for operator in found.keys() & unreported.keys():
        found[operator][_UNREPORTED] = unreported[operator]
    return {operator: dict(reasons.most_common(MAX_REASONS)) for operator, reasons in sorted(found.items())}


def _list_known_operators(backend: str) -> frozenset[str] | None:
    """Return the operators that a partitioner examines, such as ``add.Tensor``; None if it has no such list."""
    if backend != "xnnpack":
        return None
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return frozenset(XnnpackPartitioner().target_partitioner_configs)

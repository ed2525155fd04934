"""Where the parts of a program ran: on the device that it was told to run on, or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hil.errors import RanElsewhere

MOST_NAMES = 200
# ExecuTorch's own kernels, and its backends as `--backend=` and as programs call them. Of several that the flag names,
# the later ones may take what the first leaves.
PORTABLE = "portable"
BACKEND_FLAG = "--backend="
BACKENDS = {"xnnpack": "XnnpackBackend", PORTABLE: PORTABLE}
_SHOWN = 8


@dataclass(frozen=True)
class Part:
    """The nodes of a program that one device, provider or delegate ran.

    Attributes:
        device: as the runtime names it: ``CPUExecutionProvider``, ``local-task``, ``XnnpackBackend``.
        nodes: how many; 0 where the runtime does not tell nodes apart, and this is the whole program.
        names: which, where the runtime names them; at most :data:`MOST_NAMES`.
        elsewhere: whether this is another place than the program was told to run in.
    """

    device: str
    nodes: int = 0
    names: tuple[str, ...] = ()
    elsewhere: bool = False

    @classmethod
    def of(cls, device: str, names: Sequence[str], *, elsewhere: bool = False) -> Part:
        """The part that has all of these nodes; it keeps as many names as it may."""
        return cls(device, len(names), tuple(names[:MOST_NAMES]), elsewhere)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Part:
        """The part that :meth:`to_json` made a dictionary of."""
        return cls(values["device"], values["nodes"], tuple(values["names"]), values["elsewhere"])

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        return {"device": self.device, "nodes": self.nodes, "names": list(self.names), "elsewhere": self.elsewhere}


Placement = tuple[Part, ...]


@dataclass(frozen=True)
class RequestedDevice:
    """The device that a program was told to run on.

    Attributes:
        device: its name; "" is the runtime's default.
        binding: whether somebody asked for it: a program of which nothing ran there has failed.
        is_backend: whether it is a backend that the program was compiled for, of which the runtime does not know.
    """

    device: str
    binding: bool
    is_backend: bool = False

    @classmethod
    def of(cls, runtime: str, flags: Sequence[str], device: str) -> RequestedDevice:
        """What the board's config and the compiler's flags say together.

        Args:
            runtime: the program's.
            flags: of the compiler that made it.
            device: as the board's config names it; "" where that names none.
        """
        if runtime != "executorch":
            return cls(device, bool(device))
        # It has one device, the CPU: what is asked for is a backend.
        named = [flag.removeprefix(BACKEND_FLAG) for flag in flags if flag.startswith(BACKEND_FLAG)]
        first, _, rest = named[-1].partition(",") if named else ("", "", "")
        return cls(BACKENDS.get(first, first), bool(first) and not rest, is_backend=bool(first))

    def mark(self, placement: Placement) -> Placement:
        """The placement with what ran elsewhere marked, where the runtime could not know."""
        if not self.is_backend or any(part.device == self.device for part in placement):
            return placement
        return tuple(replace(part, elsewhere=True) for part in placement)

    def check(self, placement: Placement | None, *, no_fallback: bool) -> str:
        """Whether a program ran where it was told to; returns a note on what did not, or "".

        Args:
            placement: where it ran, marked; None where the runtime does not tell.
            no_fallback: whether any node elsewhere is an error.

        Raises:
            RanElsewhere: none of it ran there, or with ``no_fallback`` not all of it.
        """
        if placement is None:
            if no_fallback:
                raise RanElsewhere(
                    "the runtime does not tell where the program ran",
                    hint="leave --no-fallback out, or use a runtime that tells (docs/extending.md)",
                )
            return ""
        wrong = [part for part in placement if part.elsewhere]
        if not wrong or not (self.binding or no_fallback):
            return ""
        text = f"{_share(placement, wrong)} ran on {_devices(wrong)}, not on {self.device or 'the default device'}"
        if len(wrong) < len(placement):
            names = [name for part in wrong for name in part.names][:_SHOWN]
            left = sum(part.nodes for part in wrong) - len(names)
            text += f": {', '.join(names)}{f' and {left} more' if left else ''}"
        elif self.binding:
            raise RanElsewhere(text, hint="nothing of it can run there: ask for another device, or for none")
        if no_fallback:
            raise RanElsewhere(text, hint="leave --no-fallback out to allow this")
        return text


def placement_text(placement: Sequence[Mapping[str, Any]]) -> str:
    """``XnnpackBackend (1 node), portable (4 nodes)``, of a record."""
    return ", ".join(
        f"{part['device']} ({_counted(part['nodes'])})" if part["nodes"] else part["device"] for part in placement
    )


def _share(placement: Placement, wrong: Sequence[Part]) -> str:
    total, count = sum(part.nodes for part in placement), sum(part.nodes for part in wrong)
    if not count:
        return "the program"
    return f"all {_counted(total)}" if count == total > 1 else f"{count} of {_counted(total)}"


def _devices(parts: Sequence[Part]) -> str:
    return " and ".join(dict.fromkeys(part.device for part in parts))


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes != 1)}"

"""Which nodes of the model each of the program's dispatches computes."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.analysis.profile.sites_build import build
from hil.controller.backends.compilers.iree import recipe_of
from hil.controller.backends.compilers.iree_takes import as_iree_takes
from hil.controller.models.compile_errors import compiling
from hil.controller.models.conversions.torch_program import OP_TYPES
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.core.artifacts import Artifact, Model
from hil.errors import UsageError

_FILE = "sites.json"
# Raise this when what is read out of the compiler's phases changes.
_VERSION = 1


@dataclass(frozen=True)
class Site:
    """One place in the program that calls a dispatch.

    Attributes:
        key: the dispatch's name; several sites may call the same one.
        nodes: the model's nodes that it computes, or prepares something for; in the model's order.
        shapes: of operands and results, as in :class:`~hil.core.timeline.OpRow`.
        flops, bytes: estimates of one call, from the operations that the compiler fused into it; None where unknown.
    """

    key: str
    nodes: tuple[str, ...]
    shapes: str = ""
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Region:
    """Sites whose dispatches are handed to the device's queue at once, in order.

    Attributes:
        loop: the loop of the program that it is in; "" for none.
        sites: one at least.
    """

    loop: str
    sites: tuple[Site, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The dispatches' names."""
        return tuple(site.key for site in self.sites)


@dataclass(frozen=True)
class Sites:
    """All sites of a program.

    Attributes:
        regions: in the program's order.
        op_types: node -> its type, in the model's order.
        notes: what could not be had, a line each.
    """

    regions: Sequence[Region]
    op_types: Mapping[str, str]
    notes: Sequence[str] = ()

    def match(self, submissions: Sequence[Sequence[str]]) -> tuple[list[tuple[Site, ...]], list[str]]:
        """Find the sites of what was submitted in one run of the program.

        A submission is known by the dispatches in it. Where several regions hold the same ones, it is told by the
        order, if the loops that they are in leave no doubt; else its sites name the nodes of all of them.

        Args:
            submissions: the names of the dispatches in each, in order.

        Returns:
            For each submission the sites of its dispatches, and what is uncertain, a line each.
        """
        places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, keys in enumerate(submissions):
            places[tuple(keys)].append(number)
        found: list[tuple[Site, ...]] = [()] * len(submissions)
        doubts = _Doubts()
        for keys, numbers in places.items():
            for number, sites in zip(numbers, self._told_apart(keys, len(numbers), doubts), strict=True):
                found[number] = sites
        return found, doubts.lines()

    def _told_apart(self, keys: tuple[str, ...], count: int, doubts: _Doubts) -> list[tuple[Site, ...]]:
        """The sites of each of ``count`` submissions of the same dispatches."""
        regions = [region for region in self.regions if region.keys == keys]
        if not regions:
            return [tuple(self._any(key, doubts) for key in keys)] * count
        if len({region.sites for region in regions}) == 1:
            return [regions[0].sites] * count
        if count % len(regions):
            doubts.several.update(keys)
            return [tuple(_union(sites) for sites in zip(*(region.sites for region in regions), strict=True))] * count
        times = count // len(regions)
        if len({region.loop for region in regions}) == 1 and regions[0].loop:
            return [region.sites for region in regions] * times
        if times > 1:
            doubts.turns.update(keys)
        return [region.sites for region in regions for _ in range(times)]

    def _any(self, key: str, doubts: _Doubts) -> Site:
        """A dispatch by its name alone."""
        sites = [site for region in self.regions for site in region.sites if site.key == key]
        if not sites:
            doubts.nowhere.add(key)
            return Site(key, ())
        if len({site.nodes for site in sites}) > 1:
            doubts.several.add(key)
        return _union(sites)


@dataclass(frozen=True)
class _Doubts:
    """Dispatches whose nodes are uncertain.

    Attributes:
        several: at several places of the program.
        turns: in several loops, taken to turn equally often.
        nowhere: at none.
    """

    several: set[str] = field(default_factory=set)
    turns: set[str] = field(default_factory=set)
    nowhere: set[str] = field(default_factory=set)

    def lines(self) -> list[str]:
        told = (
            (self.several, "are at several places of the program: the nodes of all of them are named"),
            (self.turns, "are in several loops, which are taken to turn equally often"),
            (self.nowhere, "are at no known place of the program: they are told without nodes"),
        )
        return [f"{len(keys)} dispatches, such as {min(keys)}, {what}" for keys, what in told if keys]


def _union(sites: Iterable[Site]) -> Site:
    listed = list(sites)
    nodes = dict.fromkeys(node for site in listed for node in site.nodes)
    return dataclasses.replace(listed[0], nodes=tuple(nodes))


def dispatch_sites(
    model: Model, artifact: Artifact, *, cache: Cache, isolated: Isolated, timeout: float | None, log: Path
) -> Sites:
    """Find the sites of a program by compiling its model half way, once more.

    Args:
        model: what the program was compiled of, before any conversion. Of one that came compiled (``vmfb``) no sites
            are known.
        artifact: the program; its flags are used. Of one that holds several models no sites are known.
        cache: where the sites are kept.
        isolated: where the compiler runs.
        timeout: seconds that it may take.
        log: what it prints is appended here.

    Raises:
        CompileFailed, CompileCrashed, StageTimeout: the compiler did not get there.
        UsageError: there is no compiler, or the artifact is no program of IREE's.
    """
    if artifact.runtime != "iree":
        raise UsageError(f"a program for {artifact.runtime} has no dispatches of IREE's")
    if artifact.function != model.function:
        return Sites((), {}, ("a program of several models does not tell the nodes of its dispatches",))
    return sites_of(model, artifact.flags, cache=cache, isolated=isolated, timeout=timeout, log=log)


def sites_of(
    model: Model, flags: Sequence[str], *, cache: Cache, isolated: Isolated, timeout: float | None, log: Path
) -> Sites:
    """The sites of the program that these flags make of a model; see :func:`dispatch_sites`."""
    if model.format == "vmfb":
        return Sites((), {}, ("a program that came compiled does not tell the nodes of its dispatches",))
    taken = as_iree_takes(model, flags, cache=cache, isolated=isolated, timeout=timeout, log=log)
    model = taken.model
    recipe = recipe_of(model, taken.flags)
    op_types = model.files.get(OP_TYPES)

    def make(folder: Path) -> None:
        what = "the dispatches' nodes"
        with compiling(f"finding {what}", died=what, failed=what):
            found = isolated.call(
                build,
                {
                    "model": str(model.path.absolute()),
                    "format": model.format,
                    "dims": dict(model.dims),
                    "op_types": str(op_types.absolute()) if op_types else None,
                    "flags": list(recipe.flags),
                    "log": str(log.absolute()),
                },
                timeout=timeout,
                log=log,
            )
        (folder / _FILE).write_text(json.dumps(found))

    key = Cache.key("sites", program=recipe.key, version=_VERSION)
    entry, _ = cache.get_or_make(key, {**recipe.meta, "what": "its dispatches' nodes"}, make)
    document = json.loads((entry / _FILE).read_bytes())
    regions = tuple(
        Region(region["loop"], tuple(Site(key, tuple(nodes), *told) for key, nodes, *told in region["sites"]))
        for region in document["regions"]
    )
    return Sites(regions, document["op_types"], tuple(document["notes"]))

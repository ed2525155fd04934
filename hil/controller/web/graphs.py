"""A session's graph: which model it ran, where its nodes stand, and what its records say of each."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.analysis.graphs import imported, onnx_graph
from hil.controller.analysis.graphs.dispatches import dispatch_graph, of_members, of_operations, timed_operations
from hil.controller.analysis.graphs.layout import layered
from hil.controller.analysis.graphs.model_graph import MOST_NODES, GraphNode, ModelGraph
from hil.controller.analysis.graphs.values import (
    LayerValue,
    NodeValue,
    bisect_layers,
    merged,
    of_layers,
    of_outputs,
    of_placement,
    of_totals,
    suite_layers,
)
from hil.controller.analysis.profile.store import TABLE, read_profile
from hil.controller.analysis.profile.totals import Total
from hil.controller.storage.cache import Cache, default_root
from hil.controller.storage.isolated import Isolated, IsolatedFunction, naming_errors
from hil.controller.storage.run_context import RunContext
from hil.controller.web.graph_records import GraphRecord
from hil.controller.web.index import joined
from hil.controller.web.models import FoundModel, digest_now, find_model, is_recorded, kept_onnx
from hil.controller.web.profiles import named_profiles
from hil.controller.web.sessions import Session
from hil.controller.web.site import Site
from hil.controller.workloads.suites.zoo import zoo_models
from hil.errors import HilError, ImportFailed, UsageError

KINDS = {"onnx": "ONNX", "imported": "imported program", "dispatches": "operations of the program"}
WAYS = ("isolated", "cumulative")
TIMEOUT_S = 60.0
# A profile's table is read through, and its sums are kept: of a larger one the page says so.
MOST_TABLE_BYTES = 512 << 20
# Increase this when graphs of the same model change.
_VERSION = 1


@dataclass(frozen=True)
class Side:
    """One graph, with what is known of its nodes."""

    session: Session
    case: str
    kind: str  # of KINDS
    model: str  # its name
    graph: ModelGraph
    layout: Mapping[str, Any]
    values: Mapping[str, NodeValue]
    notes: Sequence[str] = ()
    ways: Sequence[str] = ()  # the ways in which a bisection judged its layers
    files: Sequence[Path] = ()  # what it was read from, beside the record

    @property
    def title(self) -> str:
        """What it is, for its head."""
        boards = ", ".join(self.session.boards)
        title = self.session.title if self.session.title != self.model else self.session.id
        return " · ".join(filter(None, (self.model, KINDS[self.kind], boards, title)))

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Name of a node -> its place."""
        return {node.name: place for place, node in enumerate(self.graph.nodes)}


def make_side(site: Site, record: GraphRecord, kind: str, way: str) -> Side:
    """Make a graph of what a session's record says.

    Where the model cannot be had, the nodes that the record names stand in their order.

    Raises:
        UsageError: nothing is known of any node, or the kind of graph is unknown, or cannot be had here.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no graph {kind!r}", hint=f"one of {', '.join(KINDS)}")
    if way not in WAYS:
        raise UsageError(f"layers are not judged {way!r}", hint=f"one of {', '.join(WAYS)}")
    found = _built_in(record) or find_model(record.named, Path(record.session.folder), site.roots)
    notes: list[str] = []
    drawn = _as_onnx(found, record)
    model = _model(found, drawn, record, notes)
    layers = _layers(record, drawn, way, model, notes)
    operations, profile = _operations(site, record, notes)
    # A model that is not there, or cannot be drawn, may come: such a graph is read anew each time.
    files = [file for file in (found.path, record.imported, profile) if file] if model else []
    alone, timed = of_layers(layers), of_totals(operations)
    if timed:
        # A layer's time by itself is another thing than its time within the whole program.
        alone = {name: replace(value, time_ns=None) for name, value in alone.items()}
    values = merged(
        alone,
        of_outputs(record.outputs, record.case),
        timed,
        of_placement(record.placement, [one.name for one in model[0].nodes if one.kind == "node"] if model else []),
    )
    if kind == "dispatches":
        if not operations:
            raise UsageError("\n".join([f"{record.session.title} has no profile to draw", *notes]), hint=_PROFILE_HINT)
        graph = dispatch_graph(operations, record.model, model[0] if model else None)
        return _side(record, kind, graph, {}, of_operations(graph, operations, values), notes, files)
    if kind == "imported":
        graph, layout = _imported(record, found, notes)
        return _side(record, kind, graph, layout, of_members(graph, values), notes, files)
    graph, layout = model or _from_record(record, layers, values, notes)
    holders = graph.holders()
    named = {graph.nodes[holders[name]].name: value for name, value in values.items() if name in holders}
    if lost := sorted(set(values) - set(holders) - set(of_outputs(record.outputs, record.case))):
        notes.append(f"{len(lost)} nodes that the record names are not in the model's file, such as {lost[0]}")
    return _side(record, kind, graph, layout, named, notes, files)


_PROFILE_HINT = "hil run MODEL --profile DIR makes one"


def _side(
    record: GraphRecord,
    kind: str,
    graph: ModelGraph,
    layout: Mapping[str, Any],
    values: Mapping[str, NodeValue],
    notes: Sequence[str],
    files: Sequence[Path],
) -> Side:
    placed = layout or layered(len(graph.nodes), graph.edges)
    told = tuple(dict.fromkeys((*notes, *graph.notes)))
    return Side(record.session, record.case, kind, record.model, graph, placed, values, told, record.ways, files)


def _built_in(record: GraphRecord) -> FoundModel | None:
    """The file of one of hil's own models, which is made anew where it is not there."""
    if record.built_in != "models":
        return None
    model = next((one for one in zoo_models(_context(default_root())) if one.name == record.model), None)
    return FoundModel(model.path, digest_now(model.path), inside=True) if model is not None else None


Drawn = tuple[ModelGraph, Mapping[str, Any]]


def _as_onnx(found: FoundModel, record: GraphRecord) -> FoundModel:
    """The ONNX file that shows a model: itself, or what it was made into."""
    if found.path is None or found.path.suffix.lower() == ".onnx":
        return found
    return kept_onnx(found, record.named, _context(default_root()))


def _model(found: FoundModel, drawn: FoundModel, record: GraphRecord, notes: list[str]) -> Drawn | None:
    if found.path is None or drawn.path is None:
        notes.append(found.why or drawn.why)
        return None
    try:
        document = graph_of(onnx_graph.read_onnx, drawn.digest, path=str(drawn.path), dims=dict(record.named.dims))
    except HilError as error:
        notes.append(f"{found.path.name} cannot be drawn: {error.message}")
        return None
    same = is_recorded(record.named, found, document["external"] if drawn is found else ())
    if same is False:
        if not found.inside:
            notes.append(f"{found.path.name} is not the file that was run, and lies outside of the folders served")
            return None
        notes.append(f"{found.path.name} has changed since the run: this is the graph of the file that is there now")
    return ModelGraph.from_json(document), document["layout"]


def _imported(record: GraphRecord, found: FoundModel, notes: list[str]) -> Drawn:
    kept = record.imported
    if record.runtime not in ("", "iree"):
        raise UsageError(f"a program for {record.runtime} is not imported: only IREE's are")
    if kept is None and (found.path is None or found.path.suffix.lower() != ".onnx"):
        raise UsageError(
            "the imported program was not kept, and there is no ONNX file to import again",
            hint="hil run --debug-ir DIR keeps it",
        )
    if kept is None and is_recorded(record.named, found, ()) is not True and not found.inside:
        raise UsageError(f"{record.named.path} is not the file that was run")
    if kept is None:
        notes.append("the program was imported again to be drawn: hil run --debug-ir DIR keeps the one that ran")
    document = graph_of(
        imported.read_imported,
        found.digest if kept is None else str(kept.stat().st_mtime_ns),
        text=str(kept or ""),
        model=str(found.path or ""),
        dims=dict(record.named.dims),
    )
    return ModelGraph.from_json(document), document["layout"]


def graph_of(function: IsolatedFunction, digest: str, **arguments: Any) -> Any:
    """What a function of an isolated process says of a file, kept in the user's cache by the file's digest."""
    context = _context(default_root())
    key = Cache.key("graph", function=getattr(function, "__name__", ""), digest=digest, version=_VERSION, **arguments)

    def compute() -> Any:
        with (
            tempfile.TemporaryDirectory(prefix="hil-graph-") as folder,
            naming_errors("import", "reading the graph", functools.partial(ImportFailed, stage="import"), ""),
        ):
            return context.isolated.call(function, arguments, timeout=TIMEOUT_S, log=Path(folder) / "log")

    return context.cache.get_or_compute(key, {"what": "a graph"}, compute)[0]


@functools.lru_cache(maxsize=2)
def _context(root: Path) -> RunContext:
    return RunContext(Cache(root), Isolated(2))


def _layers(
    record: GraphRecord, found: FoundModel, way: str, model: Drawn | None, notes: list[str]
) -> list[LayerValue]:
    if record.session.kind == "bisect":
        return bisect_layers(record.document, way if way in record.ways else (*record.ways, way)[0])
    if not record.cases:
        return []
    nodes: dict[str, Sequence[str]] = {}
    if model is not None and found.path is not None:
        arguments = {"path": str(found.path), "dims": dict(record.named.dims), "group": record.group}
        try:
            nodes = dict(graph_of(onnx_graph.named_layers, found.digest, **arguments))
        except HilError as error:
            notes.append(f"the nodes of layers are unknown: {error.message}")
    else:
        # Without the model a layer stands for its nodes.
        nodes = {str(one.get("layer")): [str(one.get("layer"))] for one in record.cases}
    layers, missing = suite_layers(record.cases, nodes)
    if missing:
        notes.append(f"{len(missing)} layers of the suite are not in the model's file, such as {missing[0]}")
    return layers


def _operations(site: Site, record: GraphRecord, notes: list[str]) -> tuple[list[Total], Path | None]:
    found = named_profiles(site.roots, Path(record.session.folder), record.case, {"run": record.profiles})
    if not (found and found[0].key):
        notes += ["its profile is gone, or outside of the folders that are served"] if record.profiles else []
        return [], None
    folder = found[0].folder
    try:
        look = (folder / TABLE).stat()
        if look.st_size > MOST_TABLE_BYTES:
            raise UsageError(f"its profile has {look.st_size >> 20} MiB: more than is read for a page")
        return _timed(folder, look.st_size, look.st_mtime_ns), folder / TABLE
    except OSError as error:
        notes.append(f"its profile cannot be read: {error.strerror}")
    except HilError as error:
        notes.append(error.message)
    return [], None


@functools.lru_cache(maxsize=16)
def _timed(folder: Path, size: int, changed: int) -> list[Total]:
    return timed_operations(read_profile(folder).rows)


def _from_record(
    record: GraphRecord, layers: Sequence[LayerValue], values: Mapping[str, NodeValue], notes: Sequence[str]
) -> Drawn:
    """The nodes that a record names, which nothing joins: all that is left where the model is gone."""
    outputs = of_outputs(record.outputs, record.case)
    own = (name for name in values if name not in outputs)
    names = list(dict.fromkeys([*(name for layer in layers for name in layer.nodes), *own]))
    if not names:
        raise UsageError(
            f"nothing is known of the nodes of {record.model or record.session.title}: {'; '.join(notes)};"
            " and there are neither layers nor a profile",
            hint="hil bisect, hil suite run (layers) and hil run --profile tell of nodes",
        )
    ops = {layer.nodes[0]: layer.op for layer in layers if len(layer.nodes) == 1}
    nodes = [GraphNode(name, ops.get(name, "")) for name in names[:MOST_NODES]]
    note = "what takes from what is not known: nodes stand in the record's order, and nothing joins them"
    graph = ModelGraph("onnx", record.model, nodes, [], notes=(note,))
    return graph, layered(len(nodes), [])


@dataclass(frozen=True)
class Choice:
    """What a list offers, by the words that it shows: another of a session's models, a session beside it."""

    value: str
    name: str


def models_of(database: sqlite3.Connection, session: Session) -> list[Choice]:
    """The models of a session, each by its first case."""
    if session.kind == "bisect":
        return []
    rows = database.execute(
        "select (select word from words where words.key = cases.name),"
        " (select word from words where words.key = cases.model), min(number) from cases where session = ?"
        " group by model order by 3 limit 500",
        (session.key,),
    )
    return [Choice(row[0], row[1]) for row in rows if row[1]]


def beside(database: sqlite3.Connection, session: Session, model: str) -> list[Choice]:
    """The sessions with cases of the same model, the newest first."""
    stem = model.removesuffix(".onnx")
    names = (stem, f"{stem}.onnx")
    # A session's list of models, in which what no case ran may stand too, spares looking through the cases of all.
    rows = database.execute(
        "select root, id, kind, boards, created from sessions where (instr(models, ?) or instr(models, ?)) and exists"
        " (select 1 from cases where session = sessions.key"
        " and model in (select words.key from words where word in (?, ?)))"
        " order by created desc limit 50",
        (*(joined([name]) for name in names), *names),
    )
    return [
        Choice(f"{row[0]}:{row[1]}", f"{row[1]} ({row[2]}, {(row[3] or '').strip().replace(chr(10), ', ')})")
        for row in rows
        if (row[0], row[1]) != (session.root, session.id)
    ]

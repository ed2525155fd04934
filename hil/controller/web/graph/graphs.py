"""Build a session's graph: find the model, lay out nodes, and attach the recorded values."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.analysis.graphs import imported, onnx_graph
from hil.controller.analysis.graphs.dispatches import dispatch_graph, map_members, map_operations, sum_operations
from hil.controller.analysis.graphs.layout import lay_out
from hil.controller.analysis.graphs.model_graph import MAX_NODES, GraphNode, ModelGraph
from hil.controller.analysis.graphs.scopes import Scope, find_inner_scopes, find_scopes
from hil.controller.analysis.graphs.values import (
    LayerValue,
    NodeValue,
    bisect_layers,
    map_layers,
    map_outputs,
    map_placement,
    map_totals,
    merge_values,
    read_suite_layers,
)
from hil.controller.analysis.profile.store import TABLE, read_profile
from hil.controller.records.commands.stored import ProfileTotal
from hil.controller.storage.cache import Cache, choose_default_root
from hil.controller.storage.isolation.isolated import Isolated, IsolatedFunction, convert_errors
from hil.controller.storage.run_context import RunContext
from hil.controller.web.files.made import check_room
from hil.controller.web.graph.models import FoundModel, digest_now, find_kept_onnx, find_model, is_recorded
from hil.controller.web.graph.records import GraphRecord
from hil.controller.web.index.index import join_names
from hil.controller.web.index.profiles import list_named_profiles
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.site import WebSite
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.workloads.suites.zoo import build_zoo_models
from hil.errors import HilError, ImportFailed, UsageError

KINDS = {"onnx": "ONNX", "imported": "imported program", "dispatches": "operations of the program"}
WAYS = ("isolated", "cumulative")
TIMEOUT_SECONDS = 60.0
# Maximum bytes for a profile's table. The page reports an error for larger profiles.
MAX_TABLE_BYTES = 512 << 20
# Increase this when graphs change for the same model.
_VERSION = 1


@dataclass(frozen=True)
class GraphSide:
    """Graph with values for nodes."""

    session: IndexedSession
    case: str
    kind: str  # from KINDS
    model: str  # model name
    graph: ModelGraph
    layout: Mapping[str, Any]
    values: Mapping[str, NodeValue]
    notes: Sequence[str] = ()
    ways: Sequence[str] = ()  # for a bisection: the available methods to judge layers, see WAYS
    files: Sequence[Path] = ()  # source files other than the record
    first_layer: str = ""  # a bisection's first wrong layer

    @property
    def title(self) -> str:
        """Graph title."""
        boards = ", ".join(self.session.boards)
        title = self.session.title if self.session.title != self.model else self.session.id
        return " · ".join(filter(None, (self.model, KINDS[self.kind], boards, title)))

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Node name -> index in the graph."""
        return {node.name: place for place, node in enumerate(self.graph.nodes)}

    @functools.cached_property
    def scopes(self) -> dict[str, Scope]:
        """Path -> name scope with multiple nodes."""
        return find_scopes(self.graph)

    @functools.cached_property
    def inner_scopes(self) -> dict[int, str]:
        """Node index -> path of the innermost scope."""
        return find_inner_scopes(self.scopes)


def make_side(site: WebSite, record: GraphRecord, kind: str, way: str) -> GraphSide:
    """Build a graph from a session's record.

    If the model is not available, show the recorded nodes in order, without edges.

    Raises:
        UsageError: no node is known, or this kind of graph is unknown or not available.
    """
    if kind not in KINDS:
        raise InvalidParameter.choose("graph", kind, KINDS)
    if way not in WAYS:
        raise InvalidParameter.choose("layer mode", way, WAYS)
    found = _find_built_in(record) or find_model(record.named, Path(record.session.folder), site.roots)
    notes: list[str] = []
    drawn = _convert_to_onnx(found, record)
    model = _draw_model(found, drawn, record, notes)
    layers = _read_layers(record, drawn, way, model, notes)
    operations, profile = _read_operations(site, record, notes)
    # Without a model, return no files. The graph is then not cached, because the model may become available later.
    files = [file for file in (found.path, record.imported, profile) if file] if model else []
    alone, timed = map_layers(layers), map_totals(operations)
    if timed:
        # Do not show times of isolated layers next to times from the whole program.
        alone = {name: replace(value, time_ns=None) for name, value in alone.items()}
    values = merge_values(
        alone,
        map_outputs(record.outputs, record.case),
        timed,
        map_placement(record.placement, [one.name for one in model[0].nodes if one.kind == "node"] if model else []),
    )
    if kind == "dispatches":
        if not operations:
            raise UsageError("\n".join([f"{record.session.title} has no profile", *notes]), hint=_PROFILE_HINT)
        graph = dispatch_graph(operations, record.model, model[0] if model else None)
        return _build_side(record, kind, graph, {}, map_operations(graph, operations, values), notes, files)
    if kind == "imported":
        graph, layout = _draw_imported(record, found, notes)
        return _build_side(record, kind, graph, layout, map_members(graph, values), notes, files)
    graph, layout = model or _draw_record(record, layers, values, notes)
    holders = graph.holders()
    named = {graph.nodes[holders[name]].name: value for name, value in values.items() if name in holders}
    if lost := sorted(set(values) - set(holders) - set(map_outputs(record.outputs, record.case))):
        notes.append(f"{len(lost)} nodes of the record are missing from the model file, such as {lost[0]}")
    return _build_side(record, kind, graph, layout, named, notes, files)


_PROFILE_HINT = "hil run MODEL --profile DIR writes a profile"


def _build_side(
    record: GraphRecord,
    kind: str,
    graph: ModelGraph,
    layout: Mapping[str, Any],
    values: Mapping[str, NodeValue],
    notes: Sequence[str],
    files: Sequence[Path],
) -> GraphSide:
    placed = layout or lay_out(len(graph.nodes), graph.edges)
    told = tuple(dict.fromkeys((*notes, *graph.notes)))
    return GraphSide(
        *(record.session, record.case, kind, record.model, graph, placed, values, told, record.ways, files),
        first_layer=record.first_layer,
    )


def _find_built_in(record: GraphRecord) -> FoundModel | None:
    """Return a built-in model's file. A missing file is generated."""
    if record.built_in != "models":
        return None
    model = next(
        (one for one in build_zoo_models(_run_context(choose_default_root())) if one.name == record.model), None
    )
    return FoundModel(model.path, digest_now(model.path), inside=True) if model is not None else None


Drawn = tuple[ModelGraph, Mapping[str, Any]]


def _convert_to_onnx(found: FoundModel, record: GraphRecord) -> FoundModel:
    """Return the model as an ONNX file: the file itself, or its cached conversion."""
    if found.path is None or found.path.suffix.lower() == ".onnx":
        return found
    return find_kept_onnx(found, record.named, _run_context(choose_default_root()))


def _draw_model(found: FoundModel, drawn: FoundModel, record: GraphRecord, notes: list[str]) -> Drawn | None:
    if found.path is None or drawn.path is None:
        notes.append(found.why or drawn.why)
        return None
    try:
        document = read_graph(onnx_graph.read_onnx, drawn.digest, path=str(drawn.path), dims=dict(record.named.dims))
    except HilError as error:
        notes.append(f"cannot draw {found.path.name}: {error.message}")
        return None
    same = is_recorded(record.named, found, document["external"] if drawn is found else ())
    if same is False:
        if not found.inside:
            notes.append(f"{found.path.name} has changed since the run, and is outside the served directories")
            return None
        notes.append(f"{found.path.name} has changed since the run: the graph shows the current file")
    return ModelGraph.from_json(document), document["layout"]


def _draw_imported(record: GraphRecord, found: FoundModel, notes: list[str]) -> Drawn:
    kept = record.imported
    if record.runtime not in ("", "iree"):
        raise UsageError(f"cannot draw a program for {record.runtime}: hil imports only IREE programs")
    if kept is None and (found.path is None or found.path.suffix.lower() != ".onnx"):
        raise UsageError(
            "the imported program was not stored, and the ONNX file is unavailable",
            hint="hil run --debug-ir DIR stores the imported program",
        )
    if kept is None and is_recorded(record.named, found, ()) is not True and not found.inside:
        raise UsageError(f"cannot verify that {record.named.path} is the file of the run")
    if kept is None:
        notes.append("hil imported the program again for this graph; to store it, use hil run --debug-ir DIR")
    document = read_graph(
        imported.read_imported,
        found.digest if kept is None else str(kept.stat().st_mtime_ns),
        text=str(kept or ""),
        model=str(found.path or ""),
        dims=dict(record.named.dims),
    )
    return ModelGraph.from_json(document), document["layout"]


def read_graph(function: IsolatedFunction, digest: str, **arguments: Any) -> Any:
    """Call a function for a file in an isolated process. The user's cache stores the result by the file's digest."""
    context = _run_context(choose_default_root())
    key = Cache.key("graph", function=getattr(function, "__name__", ""), digest=digest, version=_VERSION, **arguments)

    def compute() -> Any:
        check_room(context.cache)
        with (
            tempfile.TemporaryDirectory(prefix="hil-graph-") as folder,
            convert_errors("import", "reading the graph", functools.partial(ImportFailed, stage="import"), ""),
        ):
            return context.isolated.call(function, arguments, timeout=TIMEOUT_SECONDS, log=Path(folder) / "log")

    return context.cache.get_or_compute(key, {"what": "a graph"}, compute)[0]


@functools.lru_cache(maxsize=2)
def _run_context(root: Path) -> RunContext:
    return RunContext(Cache(root), Isolated(2))


def _read_layers(
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
            nodes = dict(read_graph(onnx_graph.list_named_layers, found.digest, **arguments))
        except HilError as error:
            notes.append(f"layer nodes unknown: {error.message}")
    else:
        # Without the model, layers become nodes.
        nodes = {str(one.get("layer")): [str(one.get("layer"))] for one in record.cases}
    layers, missing = read_suite_layers(record.cases, nodes)
    if missing:
        notes.append(f"{len(missing)} layers of the suite are missing from the model file, such as {missing[0]}")
    return layers


def _read_operations(site: WebSite, record: GraphRecord, notes: list[str]) -> tuple[list[ProfileTotal], Path | None]:
    found = list_named_profiles(site.roots, Path(record.session.folder), record.case, {"run": record.profiles})
    if not (found and found[0].key):
        notes += ["profile deleted, or outside the served directories"] if record.profiles else []
        return [], None
    folder = found[0].folder
    try:
        look = (folder / TABLE).stat()
        if look.st_size > MAX_TABLE_BYTES:
            raise UsageError(f"profile exceeds the size limit for pages: {look.st_size >> 20} MiB")
        return _read_timed_operations(folder, look.st_size, look.st_mtime_ns), folder / TABLE
    except OSError as error:
        notes.append(f"cannot read the profile: {error.strerror}")
    except HilError as error:
        notes.append(error.message)
    return [], None


@functools.lru_cache(maxsize=16)
def _read_timed_operations(folder: Path, size: int, changed: int) -> list[ProfileTotal]:
    return sum_operations(read_profile(folder).rows)


def _draw_record(
    record: GraphRecord, layers: Sequence[LayerValue], values: Mapping[str, NodeValue], notes: Sequence[str]
) -> Drawn:
    """Return the recorded nodes without edges, for a model that is not available."""
    outputs = map_outputs(record.outputs, record.case)
    own = (name for name in values if name not in outputs)
    names = list(dict.fromkeys([*(name for layer in layers for name in layer.nodes), *own]))
    if not names:
        reasons = "; ".join([*notes, "the record contains neither layers nor a readable profile"])
        raise UsageError(
            f"cannot draw the nodes of {record.model or record.session.title}: {reasons}",
            hint="hil bisect, hil suite run (layers) and hil run --profile record nodes",
        )
    ops = {layer.nodes[0]: layer.op for layer in layers if len(layer.nodes) == 1}
    nodes = [GraphNode(name, ops.get(name, "")) for name in names[:MAX_NODES]]
    note = "connections unknown: the nodes are in the order of the record"
    graph = ModelGraph("onnx", record.model, nodes, [], notes=(note,))
    return graph, lay_out(len(nodes), [])


@dataclass(frozen=True)
class GraphChoice:
    """Option in a list: a model in the session, or a session with the same model."""

    value: str
    name: str


def list_models(database: sqlite3.Connection, session: IndexedSession) -> list[GraphChoice]:
    """Return the session's models with their first cases."""
    if session.kind == "bisect":
        return []
    rows = database.execute(
        "select (select word from words where words.key = cases.name),"
        " (select word from words where words.key = cases.model), min(number) from cases where session = ?"
        " group by model order by 3 limit 500",
        (session.key,),
    )
    return [GraphChoice(row[0], row[1]) for row in rows if row[1]]


def list_same_model(database: sqlite3.Connection, session: IndexedSession, model: str) -> list[GraphChoice]:
    """Return the sessions that contain the same model, newest first."""
    stem = model.removesuffix(".onnx")
    names = (stem, f"{stem}.onnx")
    # The session's model list may include models without cases. It limits the search to matching sessions.
    rows = database.execute(
        "select root, id, kind, boards, created from sessions where (instr(models, ?) or instr(models, ?)) and exists"
        " (select 1 from cases where session = sessions.key"
        " and model in (select words.key from words where word in (?, ?)))"
        " order by created desc limit 50",
        (*(join_names([name]) for name in names), *names),
    )
    return [
        GraphChoice(f"{row[0]}:{row[1]}", f"{row[1]} ({row[2]}, {(row[3] or '').strip().replace(chr(10), ', ')})")
        for row in rows
        if (row[0], row[1]) != (session.root, session.id)
    ]

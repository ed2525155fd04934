"""Write the JSON schemas in docs/ from the types of documents.

Run as ``python -m tools.schemas``. A test compares the files with the types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hil.controller.records.base import Record
from hil.controller.records.commands import boards, bundles, farm, models, npu, plugins, projects, stored
from hil.controller.records.commands.errors import ErrorDocument
from hil.controller.records.decisions.bisect import BisectRecord
from hil.controller.records.decisions.evaluation import EvaluatedSample, EvaluationRecord
from hil.controller.records.decisions.gate import GateRecord
from hil.controller.records.decisions.notification import AnnouncedDocument, NightMessage, NotifyReport
from hil.controller.records.decisions.reduce import ReduceRecord
from hil.controller.records.decisions.stack_search import StackSearchRecord
from hil.controller.records.decisions.triage import TriageDocument
from hil.controller.records.lab.farm import ANSWERS, FarmEvent
from hil.controller.records.lab.webhooks import TestedWebhook, WebhookMessage
from hil.controller.records.matrix import MatrixDocument, MatrixRecord, MatrixRun
from hil.controller.records.measurements import history
from hil.controller.records.measurements.bench import BenchRecord
from hil.controller.records.measurements.dispatches import DispatchList
from hil.controller.records.measurements.rerun import RerunRecord
from hil.controller.records.measurements.roofline import ModelWork, PeakReport, RooflineReport
from hil.controller.records.pages.common import PageErrorDocument
from hil.controller.records.run import RunRecord
from hil.controller.records.study import StudyRecord
from hil.controller.records.suite import CaseRecord, SuiteDocument, SuiteRecord
from hil.controller.records.trace import StoredTraceComparison, TraceComparisonDocument, TraceDocument
from hil.controller.web.server.app import PAGES
from hil.controller.web.server.url_parameters import collect_documents

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class SchemaFile:
    """Content of a schema file: definitions, and the alternatives for a whole document.

    Attributes:
        printed: Command -> alternative documents that the command prints with a field ``schema``.
        other: Name -> type of a document without the field ``schema``, or of a stored document.
        whole: Alternatives for a whole document.
    """

    title: str
    printed: Mapping[str, Sequence[type[Record]]]
    other: Mapping[str, Any]
    whole: Sequence[type[Record]] = field(default=())


COMMANDS: Mapping[str, Sequence[type[Record]]] = {
    "bench": [BenchRecord],
    "bisect": [BisectRecord, StackSearchRecord],
    "board check": [boards.CheckReport],
    "board clean": [boards.RemovedAgent],
    "board deploy": [boards.DeployedAgent],
    "board info": [boards.BoardInfo],
    "board devices": [boards.DeviceList],
    "board add": [boards.AddedBoard],
    "board list": [boards.BoardList],
    "board logs": [boards.BoardLogs],
    "board peak": [PeakReport],
    "board ping": [boards.PingReport],
    "board recover": [boards.RecoveryReport],
    "board remove": [boards.RemovedBoard],
    "board rename": [boards.RenamedBoard],
    "board reset": [boards.ResetReport],
    "board console": [boards.ConsoleDocument],
    "board provision": [boards.ProvisionReport],
    "board reset-fence": [boards.FenceReset],
    "board show": [boards.BoardDescription],
    "board trust": [boards.TrustedFolder, boards.TrustList, boards.RemovedTrust],
    "bundle create": [bundles.BundleDescription],
    "bundle export": [bundles.ExportedBundle],
    "bundle extract": [bundles.ExtractedProgram],
    "bundle import": [bundles.BundleDescription],
    "bundle inspect": [bundles.BundleDescription],
    "bundle run": [RunRecord],
    "bundle verifier": [bundles.BuiltVerifier],
    "bundle verify": [bundles.VerifiedBundle],
    "cache gc": [stored.DeletedEntries],
    "cache ls": [stored.CacheList],
    "compare": [models.CompareResult],
    "compile": [models.CompiledProgram],
    "config show": [projects.EffectiveConfig],
    "doctor": [projects.DoctorReport],
    "eval": [EvaluationRecord],
    "flows": [models.FlowList],
    "gate": [GateRecord],
    "history accept": [history.AcceptedEntries],
    "history add": [history.AddedEntries],
    "history annotate": [history.AddedAnnotation],
    "history import": [history.AddedEntries],
    "history ls": [history.SeriesList],
    "history show": [history.SeriesHistory],
    "init": [projects.CreatedProject],
    "layers": [models.LayerList, DispatchList],
    "notify": [NotifyReport],
    "new-plugin": [plugins.NewPlugin],
    "plugin check": [plugins.PluginReport],
    "profile diff": [stored.ProfileComparison],
    "profile export": [stored.NodeDataFile],
    "profile import": [stored.ImportedProfile],
    "profile merge": [stored.MergedTrace],
    "profile query": [stored.QueryResult],
    "profile npu": [npu.NpuEstimate],
    "profile roofline": [RooflineReport],
    "profile show": [stored.ProfileSummary],
    "profile work": [ModelWork],
    "publish": [stored.PublishResult],
    "python -m hil.agent verify": [bundles.VerifyReport],
    "reduce": [ReduceRecord],
    "rerun": [RerunRecord],
    "runs gc": [stored.DeletedRuns],
    "runs list": [stored.RunList],
    "runs rm": [stored.DeletedRuns],
    "matrix": [MatrixDocument],
    "study run": [StudyRecord],
    "suite diff": [models.SuiteDiff],
    "suite list": [models.CaseList],
    "suite run": [SuiteDocument],
    "trace compare": [TraceComparisonDocument],
    "trace run": [RunRecord],
    "trace show": [TraceDocument],
    "triage import": [TriageDocument],
    "triage list": [TriageDocument],
    "triage remove": [TriageDocument],
    "triage set": [TriageDocument],
}
FARM_COMMANDS: Mapping[str, Sequence[type[Record]]] = {
    "farm access": [farm.BoardAccessList],
    "farm audit": [farm.AuditList],
    "farm login": [farm.FarmLogin],
    "farm logout": [farm.FarmLogout],
    "farm webhooks list": [farm.WebhookList],
    "farm webhooks test": [TestedWebhook],
    "farm backup": [farm.FarmBackup],
    "farm boards": [farm.FarmBoardList],
    "farm cancel": [farm.CancelReport],
    "farm down": [farm.StoppedFarm],
    "farm drain": [farm.BoardStateChange, farm.HostStateChange],
    "farm events": [farm.EventList],
    "farm forget": [farm.BoardRemoval],
    "farm gc": [farm.FarmCleanup],
    "farm install": [farm.InstallFiles],
    "farm lease": [farm.LeasedBoard, farm.ReservedBoard],
    "farm logs": [farm.LogList],
    "farm result": [farm.FarmResult, MatrixDocument],
    "farm console": [boards.ConsoleDocument],
    "farm power": [farm.BoardPower],
    "farm provision": [farm.FarmProvisionReport],
    "farm reservations": [farm.ReservationList, farm.BoardUnreserved],
    "farm restore": [farm.RestoredFarm],
    "farm resume": [farm.BoardStateChange, farm.HostStateChange],
    "farm status": [farm.FarmStatus, farm.SubmissionStatus, farm.JobReport],
    "farm submit": [farm.SubmittedJobs, farm.SubmittedTargets, farm.FarmResult, MatrixDocument],
    "farm token add": [farm.CreatedToken],
    "farm token list": [farm.TokenList],
    "farm token revoke": [farm.TokenRevocation],
    "farm top": [farm.StatsReport],
    "farm up": [farm.StartedFarm],
}
STORED: Mapping[str, type[Record]] = {
    "run": RunRecord,
    "suite": SuiteRecord,
    "suite case": CaseRecord,
    "matrix": MatrixRecord,
    "matrix run": MatrixRun,
    "bench": BenchRecord,
    "bisect": BisectRecord,
    "stack search": StackSearchRecord,
    "dispatches": DispatchList,
    "study": StudyRecord,
    "evaluation": EvaluationRecord,
    "evaluation sample": EvaluatedSample,
    "trace comparison": StoredTraceComparison,
}


def name_page(path: str) -> str:
    """Return the name of a page in the schema: its path, with spaces for slashes."""
    return path.strip("/").replace("/", " ") or "home"


# Page -> alternative documents of the JSON API.
WEB: Mapping[str, Sequence[type[Record]]] = {
    name_page(path): [one.kind for one in templates.values()] for path, templates in collect_documents(PAGES).items()
}
FILES = {
    "run": SchemaFile(
        "hil run --json, hil runs show --json, and stored documents",
        {"error": [ErrorDocument]},
        STORED,
        whole=(RunRecord, ErrorDocument),
    ),
    "commands": SchemaFile(
        "--json of the other commands; after an error, each prints run.schema.json#/$defs/error instead",
        COMMANDS,
        {
            "suite case": CaseRecord,
            "history entry": history.HistoryEntry,
            "notify message": NightMessage,
            "notify state": AnnouncedDocument,
        },
    ),
    "farm": SchemaFile(
        "--json of hil farm, and gateways' answers by query and action; after an error, each command prints "
        "run.schema.json#/$defs/error instead",
        FARM_COMMANDS,
        {"farm watch": FarmEvent, "webhook message": WebhookMessage, **ANSWERS},
    ),
    "web": SchemaFile("JSON API of hil web by page, such as /api/v1/session", WEB, {"error": PageErrorDocument}),
}


def write_schema(name: str) -> str:
    """Return the text of a schema file."""
    file = FILES[name]
    printed = [kind for kinds in file.printed.values() for kind in kinds]
    schemas, definitions = msgspec.json.schema_components(
        [*file.other.values(), *printed], ref_template="#/$defs/{name}", schema_hook=_describe_unknown
    )
    for kind in printed:
        _add_version(definitions[kind.__name__])
    document: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{name}.schema.json",
        "title": file.title,
        **({"oneOf": [_refer(kind) for kind in file.whole]} if file.whole else {}),
        "$defs": {
            **dict(zip(file.other, schemas, strict=False)),
            **{title: _choose(kinds) for title, kinds in file.printed.items()},
            **{title: _close(one) for title, one in definitions.items()},
        },
    }
    return json.dumps(document, indent=1) + "\n"


def _describe_unknown(kind: type) -> dict[str, Any]:
    raise TypeError(f"no schema for {kind}")


def _refer(kind: type[Record]) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _choose(kinds: Sequence[type[Record]]) -> dict[str, Any]:
    return _refer(kinds[0]) if len(kinds) == 1 else {"oneOf": [_refer(kind) for kind in kinds]}


def _add_version(definition: dict[str, Any]) -> None:
    """Add the field ``schema`` to a printed document, unless the stored document has this field."""
    if "schema" not in definition["properties"]:
        definition["properties"] = {"schema": {"const": 1}, **definition["properties"]}
        definition["required"] = ["schema", *definition["required"]]


def _close(definition: dict[str, Any]) -> dict[str, Any]:
    """Disallow unknown fields in the schema. Readers ignore unknown fields, but hil never writes them."""
    return {**definition, "additionalProperties": False} if "properties" in definition else definition


def main() -> None:
    """Write all schema files."""
    for name in FILES:
        (DOCS / f"{name}.schema.json").write_text(write_schema(name))


if __name__ == "__main__":
    main()

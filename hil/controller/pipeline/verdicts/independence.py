"""Evaluate the independence of a case's references: the relations for a pass, and the reasons of failed references."""

from __future__ import annotations

from collections.abc import Sequence

from hil.compare.verdict import Verdict, find_deciding
from hil.controller.backends.references import list_default_chain, load_references
from hil.controller.backends.references.independence import find_relation
from hil.controller.pipeline.case import Case
from hil.core.board_config import BoardConfig
from hil.core.results import Relation
from hil.core.runtimes import DEFAULT_RUNTIME
from hil.errors import ReferenceTooSlow


def get_runtime(case: Case, config: BoardConfig | None) -> str:
    """Return the runtime of the program that the references judge."""
    if case.artifact is not None:
        return case.artifact.runtime
    return case.options.runtime or (config.runtime if config else DEFAULT_RUNTIME)


def find_dependence(verdicts: Sequence[Verdict]) -> str:
    """Return a reason if no independent reference supports a pass; otherwise ""."""
    decider = find_deciding(verdicts)
    if decider is None or decider.relation is Relation.INDEPENDENT:
        return ""
    names = ", ".join(one.named for one in verdicts if one)
    return f"the pass requires an independent reference, but only {names} agrees"


def list_refusals(case: Case, runtime: str) -> tuple[list[str], list[str]]:
    """Return the reasons of failed references: a list of reasons that concern the model, and a list of other reasons.

    If an independent reference rejects the model, this is evidence about the model. A timeout is not evidence.
    """
    known = load_references()
    evidence: list[str] = []
    others: list[str] = []
    for name, why in case.unanswered.items():
        refuses = name in known and not isinstance(why, ReferenceTooSlow)
        is_evidence = refuses and find_relation(runtime, name) is Relation.INDEPENDENT
        (evidence if is_evidence else others).append(f"reference {name} failed: {why.message}")
    return evidence, others


def describe_unasked(case: Case, runtime: str) -> str:
    """Return a text with the unused independent references, or that no reference supports the model's format."""
    if case.model is None or not (names := _find_independent(case.model.format, runtime)):
        return f"no independent reference supports {case.model.format} models" if case.model else ""
    left = [name for name in names if name not in _list_used_references(case) and name not in case.unanswered]
    return f"references not run: {', '.join(left)}" if left else ""


def find_unasked_reference(case: Case, runtime: str) -> str:
    """Return an independent reference that the user can request by name; "" if there is none."""
    slow = [name for name, why in case.unanswered.items() if isinstance(why, ReferenceTooSlow)]
    names: list[str] = []
    if case.model is not None:
        # The default chain is first, then all references that support the format.
        takes = (name for name, one in load_references().items() if case.model.format in one.formats)
        others = (name for name in takes if find_relation(runtime, name) is Relation.INDEPENDENT)
        names = list(dict.fromkeys((*_find_independent(case.model.format, runtime), *others)))
    left = [*slow, *(name for name in names if name not in _list_used_references(case) and name not in case.unanswered)]
    return left[0] if left else ""


def _find_independent(model_format: str, runtime: str) -> tuple[str, ...]:
    chain = list_default_chain(model_format, runtime)
    return tuple(name for name in chain if find_relation(runtime, name) is Relation.INDEPENDENT)


def _list_used_references(case: Case) -> set[str]:
    return {str(one.provenance.get("reference", "")) for one in case.references}

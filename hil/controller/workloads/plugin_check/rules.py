"""Rules of the contract. docs/plugin-contract.md has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

PAGE = "docs/plugin-contract.md"


@dataclass(frozen=True)
class ContractRule:
    """What a package must do."""

    expected: str
    section: str  # heading in the page

    @property
    def documentation(self) -> str:
        """Page and heading that describe the rule."""
        return f"{PAGE}#{self.section}"


@dataclass(frozen=True)
class ContractFinding:
    """Violation of a rule, as a worker process reports it."""

    rule: str
    found: str

    def to_json(self) -> list[str]:
        """Return the fields as JSON values."""
        return [self.rule, self.found]


def _rules(section: str, **expected: str) -> dict[str, ContractRule]:
    return {name.replace("_", "-"): ContractRule(text, section) for name, text in expected.items()}


RULES: Mapping[str, ContractRule] = MappingProxyType(
    _rules(
        "entry-points",
        group="a group that starts with hil. is one of hil's groups",
        load="an entry point can be imported",
        type="an entry point has the type of its group",
        signature="a function takes the documented arguments",
        crash="the code of the package ends no process",
        timeout="each call ends in time",
    )
    | _rules(
        "compilers",
        compile="at least one small model compiles",
        compile_error="an unsupported model raises CompileFailed, NotRun or UsageError; these wrap no unexpected error",
        artifact="the result is an Artifact with existing files, correct digests, the flags and the model's tensors",
        compiler_name="Artifact.compiler has a name and a version",
        cache="the second compilation returns the cached program, with cached=True",
        cache_key="other flags and other models give other cache keys",
        recompute="recompute=True compiles again",
        target="a target function returns a Target or raises UsageError, for each machine",
        board_config="a board config is valid",
    )
    | _rules(
        "references",
        source="source() returns a text that stays the same",
        reference="it computes a small model; outputs have the right names, dtypes, shapes and values",
    )
    | _rules(
        "runtimes",
        board_import="the runtime's module imports nothing that boards lack",
        describe="describe() returns a version and at least one device",
        methods="the runtime and its programs have the documented methods and attributes",
        load_program="a compiled program loads; the only function of a program has the names '' and 'main'",
        load_error="a damaged program, an unknown device and an unknown function raise LoadFailed",
        specs="inputs and outputs of the program are those of the model",
        run="a loaded program runs",
        outputs="fetch() returns an array with the right dtype and shape for each output",
        values="outputs are correct",
        inputs="a run does not write to its inputs",
        determinism="equal inputs give equal outputs",
        leak="loading and running leaves no threads and open files behind",
        placement="placement() returns a tuple of Part, or None",
        profile="profile() returns files that hil can read, and checks each run",
        arithmetic="each of the listed arithmetics is one of hil's, and works",
    )
)

"""Create a bundle from a model: compile it, collect the cases, and compute the expected outputs by references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.bundles.checks import check_cases, check_inputs
from hil.compare.criteria import select_criteria
from hil.controller.backends.references import (
    choose_default_references,
    measure_noise,
    read_expected,
    run_reference,
    run_reference_with_fallback,
)
from hil.controller.backends.references.control import measure_control
from hil.controller.backends.references.generation import run_generation
from hil.controller.backends.references.noise import select_relevant_noise
from hil.controller.devices.board_choice import BoardChoice, knows_target, use_named_target
from hil.controller.devices.board_client import ProgramHandle
from hil.controller.models.generation.spec import read_spec
from hil.controller.models.inputs import make_inputs
from hil.controller.models.onnx_files.rewrite_check import check_rewrites, is_rewritten
from hil.controller.models.sizing.dimensions import check_known, own_sizes
from hil.controller.models.sizing.sizes import format_sized_name, sweep
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.decoding.decoder_calls import list_calls, make_call_inputs
from hil.controller.pipeline.decoding.generation import make_prompt_options
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.given_inputs import add_inputs_file
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import DEFAULT_TIMEOUT_SECONDS, Options
from hil.controller.pipeline.stages import check_options
from hil.controller.pipeline.tools import make_reference_settings
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.case_files import read_case
from hil.controller.workloads.bundles.methods import (
    LEFT_OUT,
    import_methods,
    make_random_record,
    read_signatures,
    settle_signatures,
)
from hil.controller.workloads.bundles.narrow_cases import narrow_cases
from hil.core import own_version
from hil.core.arithmetic import FLOAT32
from hil.core.narrow_integers import is_narrowed
from hil.core.results import Artifact, Model, RunResult
from hil.core.runtimes import choose_runtime
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array
from hil.errors import UsageError


@dataclass(frozen=True)
class Request:
    """Request to create a bundle."""

    model: Path
    functions: tuple[str, ...] = ()  # empty: all entry points in a module, or the main one in other models
    # Compiler settings, inputs and expected outputs (for a single case), seed, range, tolerances, references (at most
    # one) and timeout.
    options: Options = field(default_factory=Options)
    cases: tuple[str, ...] = ()  # ``[METHOD=]PATH`` for cases in files
    # Number of random cases per method. None adds a random case to every method without given cases. But if no
    # reference can compute the model, None adds random cases only if no method has given cases.
    random: int | None = None

    @property
    def is_of_main(self) -> bool:
        """Whether the request gives cases without method names. Such cases belong to the main method."""
        named = any(_split_method(text)[0] for text in self.cases)
        return bool(self.cases or self.options.inputs or self.options.expected) and not named


def create_bundle(
    request: Request,
    choice: BoardChoice,
    context: RunContext,
    *,
    connect: Callable[[], BoardSession],
    say: Callable[[str], None] = lambda text: None,
) -> Bundle:
    """Create a bundle.

    Args:
        choice: the target board.
        connect: opens the board. Called only if the target or the signature is otherwise unknown.

    Raises:
        UsageError: the request is invalid, or a case does not fit.
        StageError: the import, the compiler or a reference failed.
        BoardError: the board is needed but unavailable.
    """
    request = replace(request, options=apply_model_settings(request.options, request.model))
    check_options(request.options, choice, takes_ranges=True)
    models, left_out = import_methods(
        request.model, request.functions, context, only_main=request.is_of_main, dims=request.options.dims
    )
    with make_temporary_folder("hil-bundle-") as folder:
        artifact, target = _compile_program(request, models[0], choice, context, Path(folder), connect)

        def ask(program: Artifact) -> ProgramHandle:
            session = connect()
            session.board.push(artifact)
            loaded = session.load(program, timeout=DEFAULT_TIMEOUT_SECONDS)[0].loaded
            session.unload_after_run(program, broken=False)
            return loaded

        signatures = read_signatures(artifact, models, context, ask=ask)
        symbols = {f"method {name!r}": _list_symbols(one) for name, one in signatures.items()}
        check_known(request.options.dim_ranges, symbols)
        say(f"{artifact.compiler}: {', '.join(signatures)}")
        files = list(_iter_files(request, list(signatures)))
        collected = _Cases(request, files, context, Path(folder) / "reference.log", say, artifact)
        arithmetic = request.options.arithmetic or choice.config.get_arithmetic(artifact.runtime)
        suites = [
            MethodTestSuite(
                name,
                [
                    collected.add_control(name, case, signature, model, arithmetic)
                    for case in collected.iter_cases(name, signature, model, only=len(models) == 1)
                ],
            )
            for (name, signature), model in zip(signatures.items(), models, strict=True)
        ]
        if artifact.carried:
            signatures, suites = _add_carried_inputs(artifact, signatures, suites)
        if is_narrowed(artifact.flags):
            signatures, suites = narrow_cases(signatures, suites)
        model = models[0]
        # This data contains no times or random values, so that a repeated creation gives the same bundle.
        made = {
            "model": {
                "name": model.path.name,
                "format": model.format,
                "digest": model.digest,
                "dims": dict(model.dims),
            },
            "producer": dict(model.producer),
            "target": target,
            "tools": {"hil": own_version(), "compiler": artifact.compiler},
            **make_random_record(dict(zip(signatures, models, strict=True))),
        } | ({LEFT_OUT: left_out} if left_out else {})
        return Bundle.create(artifact, suites, signatures=settle_signatures(signatures, suites), made=made)


def _add_carried_inputs(
    artifact: Artifact, signatures: Mapping[str, Signature], suites: Sequence[MethodTestSuite]
) -> tuple[dict[str, Signature], list[MethodTestSuite]]:
    """Add the program's extra inputs to signatures and cases.

    This is needed because a bundle contains all inputs of the program.
    """
    specs = (artifact.inputs or ())[-len(artifact.carried) :]
    more = tuple(replace(spec, name=name) for name, spec in zip(artifact.carried, specs, strict=True))

    def complete_case(method: str, case: MethodTestCase) -> MethodTestCase:
        inputs = check_inputs(f"method {method!r}, case {case.name!r}", signatures[method], case.inputs)
        return replace(case, inputs={**inputs, **artifact.carried})

    return (
        {name: replace(one, inputs=(*one.inputs, *more)) for name, one in signatures.items()},
        [
            MethodTestSuite(suite.method_name, [complete_case(suite.method_name, case) for case in suite.test_cases])
            for suite in suites
        ],
    )


def _compile_program(
    request: Request,
    model: Model,
    choice: BoardChoice,
    context: RunContext,
    folder: Path,
    connect: Callable[[], BoardSession],
) -> tuple[Artifact, str]:
    """Return a model's program, with all entry points, and the name of the target board."""
    runtime = choose_runtime(model.format, request.options.runtime)
    config = use_named_target(choice.config, runtime, request.options.compile_flags)
    if not knows_target(config, runtime):
        config = connect().board.config
    (folder / "logs").mkdir()
    options = replace(request.options, function=model.function, runtime=runtime)
    case = Runner(context, lasting=False).compile(Case(model.name, model.path, options, folder, model), config)
    if case.error is not None:
        raise case.error
    assert case.artifact is not None
    return case.artifact, config.name


@dataclass(frozen=True)
class _Cases:
    """Collects the methods' cases from all sources."""

    request: Request
    files: Sequence[tuple[str, Path]]  # (method, case path); "" is the only method
    context: RunContext
    log: Path
    say: Callable[[str], None]
    program: Artifact  # used to choose independent references

    @property
    def _work(self) -> dict[str, Any]:
        """Settings for references and checks."""
        return make_reference_settings(self.request.options, self.context, self.log)

    def iter_cases(self, method: str, signature: Signature, model: Model, *, only: bool) -> Iterator[MethodTestCase]:
        """Yield a method's cases with expected outputs.

        Args:
            model: computes outputs that were not given.
            only: whether this is the only method, so that arguments without a method name belong to this method.
        """
        options, random = self.request.options, self.request.random
        if only and not self.files:
            options = add_inputs_file(options, self.request.model)
        found = []
        # With --generate, the given inputs are constant inputs of the decoder, not a case.
        if (options.inputs or options.expected) and options.generate is None:
            if not only:
                raise UsageError(
                    "--input and --expected require a single method, but the program has several",
                    hint="select one with --function, or pass cases in files: --case METHOD=PATH",
                )
            inputs = self._make_inputs(signature, model, options.inputs, options.seed)
            expected = read_expected(options.expected, signature.outputs) if options.expected else None
            outputs, source = (dict(expected.outputs), expected.source) if expected else ({}, "")
            found.append(MethodTestCase(inputs, outputs, name="given", source=source))
        found += [read_case(path, signature) for name, path in self.files if name in (method, "")]
        if options.generate is not None:
            if not only:
                raise UsageError("--generate requires a single method", hint="select one with --function")
            found += self._read_calls(signature, model, options.generate)
        if random is None:
            # Without a reference for this model, use only given cases, if any method has some.
            random = int(not found and not (self.files and not choose_default_references(model)))
        for seed in range(options.seed, options.seed + random):
            for sizes in sweep(own_sizes(options.dim_ranges, _list_symbols(signature))):
                inputs = self._make_inputs(signature, model, (), seed, sizes)
                found.append(MethodTestCase(inputs, {}, name=format_sized_name(f"seed{seed}", sizes)))
        for case in found:
            yield self._complete(method, case, signature, model)

    def _read_calls(self, signature: Signature, model: Model, generate: Path) -> Iterator[MethodTestCase]:
        """Yield a case for every call of a decoder, for all prompts of a specification."""
        spec = read_spec(generate)
        if spec.reference:
            raise UsageError(
                f"{generate}: a bundle does not support `reference`",
                hint="remove `reference`: the model computes the expected outputs",
                option="--generate",
            )
        runner, folder = Runner(self.context, lasting=False), self.log.parent
        # Do not apply the criteria here: they apply to the calls.
        given = replace(self.request.options, accept=())
        for prompt in spec.cases:
            self.say(f"generating tokens of {prompt.name}")
            options = make_prompt_options(given, prompt.name)
            case = runner.begin(self.request.model, options, folder, name=prompt.name)
            if case.error is not None:
                raise case.error
            assert case.decoder is not None and case.inputs is not None
            settings = make_reference_settings(options, self.context, self.log)
            case = replace(case, result=run_generation(model, case.inputs, case.decoder.plan, **settings))
            for call in list_calls(case):
                inputs = make_call_inputs(case, call, self.context, self.log)
                named = dict(zip((spec.name for spec in signature.inputs), inputs.values(), strict=True))
                yield MethodTestCase(named, {}, name=f"{prompt.name}-{call.name}")

    def _make_inputs(
        self, signature: Signature, model: Model, given: Any, seed: int, sizes: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        options = self.request.options
        dims = {**options.dims, **(sizes or {})}
        more: dict[str, Any] = {"ranges": model.ranges, "user_range": options.input_range, "dims": dims}
        return make_inputs(signature.inputs, given, seed=seed, **more)

    def add_control(
        self, method: str, case: MethodTestCase, signature: Signature, model: Model, arithmetic: str
    ) -> MethodTestCase:
        """Add the control for the board's arithmetic to a case, if hil can compute the model in this arithmetic.

        A control is unnecessary with a given tolerance, or if criteria judge all outputs.
        """
        options = self.request.options
        if arithmetic in ("", FLOAT32) or model.format != "onnx" or model.random:
            return case
        rules = load_rules(options.accept)
        judged_otherwise = all(select_criteria(spec.name, rules) for spec in signature.outputs)
        if options.rtol is not None or options.atol is not None or judged_otherwise:
            return case
        inputs = check_inputs(f"method {method!r}, case {case.name!r}", signature, case.inputs)
        self.say(f"computing {case.name} in {arithmetic}")
        found = measure_control(model, inputs, arithmetic, **self._work)
        names = zip((spec.name for spec in signature.outputs), (spec.name for spec in model.outputs or ()), strict=True)
        return replace(case, control={name: found[theirs] for name, theirs in names if theirs in found})

    def _complete(self, method: str, case: MethodTestCase, signature: Signature, model: Model) -> MethodTestCase:
        """Add the requested tolerances to a case, and a reference's outputs if the case has no expected outputs.

        Raises:
            ImportFailed: rewriting the model for its compiler, or for the reference, changed an output.
        """
        options, settings = self.request.options, self._work
        case = replace(case, rtol=options.rtol, atol=options.atol, accept=options.accept)
        inputs = check_inputs(f"method {method!r}, case {case.name!r}", signature, case.inputs)
        if len(case.expected_outputs):
            if is_rewritten(model, [self.program.compiler]):
                check_rewrites(model, inputs, **settings)
            (checked,) = check_cases(method, signature, [case])
            expected = list(checked.expected_outputs.values())
            if options.atol is None and not case.noise and len(expected) == len(model.outputs or ()):
                self.say(f"measuring the rounding noise of {case.name}")
                named = zip((spec.name for spec in model.outputs or ()), expected, strict=True)
                given = RunResult(case.source, dict(named))
                case = replace(case, noise=self._measure_noise(signature, model, inputs, given))
            return case if case.source else replace(case, source="given with the case")
        self.say(f"computing the reference for {case.name}")
        if options.references:
            result = run_reference(options.references[0], model, inputs, runtime=self.program.runtime, **settings)
        else:
            result, _ = run_reference_with_fallback(model, inputs, runtime=self.program.runtime, **settings)
        if is_rewritten(model, [self.program.compiler, result.provenance["reference"]]):
            check_rewrites(model, inputs, **settings)
        return replace(
            case,
            inputs=inputs,
            expected_outputs=list(result.outputs.values()),
            source=result.source,
            noise=self._measure_noise(signature, model, inputs, result),
            relation=result.relation,
        )

    def _measure_noise(
        self, signature: Signature, model: Model, inputs: Mapping[str, Array], result: RunResult
    ) -> dict[str, Array]:
        """Return output name -> noise. A bundle contains it, because its runs have no reference to measure it."""
        measured = measure_noise(model, inputs, result, **self._work)
        wanted = {name: noise for name, noise in measured.items() if name in result.outputs}
        relevant = select_relevant_noise(result.outputs, wanted)
        names = zip((spec.name for spec in signature.outputs), result.outputs, strict=True)
        return {name: relevant[theirs] for name, theirs in names if theirs in relevant}


def _list_symbols(signature: Signature) -> set[str]:
    return {dim for spec in signature.inputs for dim in spec.shape if isinstance(dim, str)}


def _split_method(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return ("", text) if not equals or Path(text).exists() else (name, path)


def _iter_files(request: Request, methods: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the method and path from ``[METHOD=]PATH`` arguments. The method is "" if not given."""
    for text in request.cases:
        name, path = _split_method(text)
        if name not in methods and (name or len(methods) > 1):
            what = f"method {name!r} not found" if name else "the program has several methods"
            raise UsageError(f"--case {path}: {what}", hint=f"use --case METHOD={path}; methods: {', '.join(methods)}")
        yield name, Path(path)

"""Find the first wrong call of a generation, so that its layers can be bisected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.models.generation.spec import read_spec
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.decoding.decoder_calls import DecoderCall, list_calls, make_call_inputs
from hil.controller.pipeline.decoding.generation import make_prompt_options
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.runs import convert_write_errors
from hil.core.results import Outcome
from hil.core.tensors import Array

_ALL_TOKENS = "prefill only"


def find_wrong_call(
    path: Path,
    options: Options,
    folder: Path,
    runner: Runner,
    pool: BoardPool,
    choice: BoardChoice,
    faults: Sequence[str],
) -> tuple[dict[str, Array], str]:
    """Run the prompts of ``options.generate`` until a prompt fails.

    Returns:
        The inputs of the first wrong call, with the reference's cache, and a sentence that names the call. If no prompt
        fails, or the failed prompt has no wrong position, the function returns the inputs of the last call.

    Raises:
        UsageError: The specification does not fit the model.
        StageError, BoardError: A prompt ended in an error.
    """
    assert options.generate is not None
    with convert_write_errors(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    for prompt in read_spec(options.generate).prompt:
        begun = runner.begin(path, make_prompt_options(options, prompt.name), folder, name=prompt.name)
        (case,) = runner.run([begun], pool, choice, runtimes=(options.runtime,), faults=faults)
        if case.error is not None:
            raise case.error
        if case.outcome is not Outcome.PASS:
            break
    call = _find_call(case)
    return make_call_inputs(case, call, runner.context, folder / "logs" / "call.log"), _describe_call(case, call)


def _find_call(case: Case) -> DecoderCall:
    """Return the call with the first wrong position."""
    calls, judged = list(list_calls(case)), case.generation
    if judged is None or judged.fault is None:
        return calls[-1]
    if judged.fault.phase == _ALL_TOKENS:
        return DecoderCall(0, calls[-1].end, 0)
    position = judged.fault.position
    return next(call for call in calls if call.begin <= position < call.end)


def _describe_call(case: Case, call: DecoderCall) -> str:
    judged, prompt = case.generation, case.options.prompt
    where = f"position {call.begin}" if call.end == call.begin + 1 else f"positions {call.begin} to {call.end - 1}"
    if case.outcome is Outcome.PASS:
        return f"all prompts passed; hil bisects the last call of prompt {prompt}, {where}"
    if judged is None or judged.fault is None:
        return f"prompt {prompt} has no wrong position; hil bisects the last call, {where}: {case.reason}"
    return f"hil bisects the call of prompt {prompt} at {where}: {case.reason}"

"""`hil run --generate` on simulated boards: right decoders pass, and each planted fault has its cause and place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.commands import Ended
from support.decoder import DECODER, NumpyDecoder, import_make
from support.waiting import eventually

from hil.core.steps import TURN_END, TokenPlaces, split_turns

MODEL = DECODER / "decoder.onnx"
PROMPT = list(b"The board needs ")
FORCED = list(b"SSH, a POSIX shell (busy")  # positions 16 to 39
# Tokens of the decoder are the codes of ASCII characters.
ASCII_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
    "model": {"type": "WordLevel", "vocab": {chr(code): code for code in range(128)}, "unk_token": "?"},
}
ORT, IREE = ("--runtime", "onnxruntime"), ("--runtime", "iree")


def write_spec(folder: Path, **prompts: tuple[list[int], list[int]]) -> Path:
    """Write a specification with prompts: name -> tokens, forced tokens."""
    rows = [
        f'[[prompt]]\nname = "{name}"\ntokens = {tokens}\nforced = {forced}'
        for name, (tokens, forced) in prompts.items()
    ]
    path = folder / "generate.toml"
    path.write_text("\n".join(["steps = 24", *rows]))
    return path


@pytest.fixture
def generate(hil: Callable[..., Ended], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the decoder with one prompt, and return the exit code and the case."""

    def call(*options: str, model: Path = MODEL, forced: list[int] = FORCED) -> tuple[int, dict[str, Any]]:
        spec = write_spec(tmp_path, one=(PROMPT, forced))
        where = () if "--runtime-hw-type" in options else ("--runtime-hw-type", "sim")
        ended = hil("run", model, "--generate", spec, *where, *options, "--json")
        return ended.code, ended.case

    return call


def run_exactly(tokens: list[int]) -> np.ndarray:
    """Return the logits of tokens in float64."""
    return NumpyDecoder(import_make().load_weights()).run(tokens)


@pytest.fixture(scope="module")
def static_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder with a static cache and a mask with a row per token."""
    make = import_make()
    path = tmp_path_factory.mktemp("static") / "decoder_static.onnx"
    onnx.save(make.Decoder(make.load_weights(), is_static=True).build(), path)
    return path


FAULTS = {
    "kv_slot:position=24": ("FAIL", "slot, step 9, position 24, present.0.value, decode only: at position 24 KL"),
    "mask": ("FAIL", "mask, in the prompt, position 1, present.1.value: at position 1 KL"),
    "rope:position=28": ("FAIL", "position, step 13, position 28, present.0.key: at position 28 KL"),
    "stale_cache": ("UNSTABLE", "stale cache, in the prompt, position 0, logits: the prompt returned different"),
    "overflow:position=30,layer=1": ("FAIL", "overflow, layer 1, step 15, position 30, present.2.key: at position 30"),
    "wrong_layer:position=27": ("FAIL", "layer 2, step 12, position 27, present.3.value, decode only: at position 27"),
    "argmax:position=20": ("FAIL", "sampler, step 5, position 20: the board chose token "),
}


@pytest.mark.parametrize(("fault", "expected"), FAULTS.items(), ids=FAULTS)
def test_generation_names_fault_on_onnxruntime(generate, fault, expected):
    code, case = generate(*ORT, "--fault", fault)
    assert (code, case["outcome"]) == (1, expected[0])
    assert case["reason"].startswith(expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kv_slot:position=24", "wrong_layer:position=27"])
def test_generation_names_fault_on_iree(generate, fault):
    code, case = generate(*IREE, "--fault", fault)
    assert (code, case["outcome"]) == (1, FAULTS[fault][0])
    assert case["reason"].startswith(FAULTS[fault][1])


@pytest.mark.parametrize(
    "runtime", [pytest.param(ORT, id="onnxruntime"), pytest.param(IREE, marks=pytest.mark.slow, id="iree")]
)
def test_generation_passes_with_free_tokens(generate, runtime):
    code, case = generate(*runtime, forced=[])
    assert (code, case["outcome"]) == (0, "PASS"), case["reason"]


# The host computes the model node by node, which takes long on a busy machine.
IN_ARITHMETIC = (*ORT, "--timeout", "300", "--runtime-hw-type")


@pytest.mark.slow
@pytest.mark.parametrize("board", ["sim-f16", "sim-bf16"])
def test_generation_passes_in_arithmetic_of_board(generate, board):
    code, case = generate(*IN_ARITHMETIC, board)
    assert (code, case["outcome"]) == (0, "PASS"), case["reason"]


@pytest.mark.slow
def test_generation_names_fault_in_arithmetic_of_board(generate):
    _, case = generate(*IN_ARITHMETIC, "sim-f16", "--fault", "kv_slot:position=24")
    assert case["reason"].startswith(FAULTS["kv_slot:position=24"][1])


@pytest.mark.slow
def test_generation_names_mask_that_shows_next_token(generate, static_decoder):
    code, case = generate(*ORT, "--fault", "mask:how=show-next", model=static_decoder)
    assert (code, case["outcome"]) == (1, "FAIL")
    assert case["reason"].startswith("mask, in the prompt, position 0, present.1.value, prefill only: at position 0")


@pytest.mark.slow
def test_run_finds_smallest_failing_prompt(hil, tmp_path, static_decoder):
    spec = tmp_path / "generate.toml"
    spec.write_text(f'steps = 0\nlengths = [1, 9]\n[[prompt]]\nname = "one"\ntokens = {PROMPT}\n')
    where = ("--runtime-hw-type", "sim", *ORT, "--fault", "mask:how=show-next")
    document = hil("run", static_decoder, "--generate", spec, *where, "--json").document
    # A mask that shows the next token of a call has no effect on a single token.
    assert {case["name"].rsplit("-", 1)[-1]: case["outcome"] for case in document["cases"]} == {
        "one": "FAIL",
        **dict.fromkeys(["2", "3", "5", "9"], "FAIL"),
        "1": "PASS",
    }
    (smallest,) = document["smallest_failing"]
    assert smallest["dims"] == {"prompt tokens": 2}


@pytest.mark.parametrize("runtime", [ORT, pytest.param(IREE, marks=pytest.mark.slow)])
def test_generation_continues_with_turns(hil, tmp_path, runtime):
    spec = tmp_path / "generate.toml"
    turns = "".join(f"[[prompt.turn]]\ntokens = {list(text)}\n" for text in (b"Run the ", b"Copy "))
    spec.write_text(f"steps = 6\n[[prompt]]\ntokens = {PROMPT}\n{turns}")
    where = ("--runtime-hw-type", "sim", *runtime)
    case = hil("run", MODEL, "--generate", spec, *where, "--json").case
    assert case["outcome"] == "PASS" and case["generation"]["steps"] == 18
    prompt, tokens = case["generation"]["prompt_tokens"], case["generation"]["tokens"]
    turns = zip(split_turns(prompt), split_turns(tokens), strict=True)
    logits = run_exactly([token for turn, picked in turns for token in (*turn, *picked[:-1])])
    expected = [int(np.argmax(logits[place])) for place in TokenPlaces.from_turns(prompt, tokens).chosen]
    assert [token for token in tokens if token != TURN_END] == expected


@pytest.mark.slow
def test_generation_names_step_of_later_turn(hil, tmp_path):
    spec = tmp_path / "generate.toml"
    spec.write_text(
        f"[[prompt]]\ntokens = {PROMPT}\nforced = {FORCED[:4]}\n"
        f"[[prompt.turn]]\ntokens = {list(b'Run the ')}\nforced = {FORCED[:6]}\n"
    )
    fault = ("--fault", "rope:position=30")  # 16 + 4 + 8 tokens are before the steps of the second turn
    case = hil("run", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT, *fault, "--json").case
    assert case["reason"].startswith("position, step 7, position 30, present.0.key")


@pytest.mark.slow
def test_run_shows_perplexity_of_text(hil, tmp_path):
    pytest.importorskip("tokenizers")
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:120]
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(json.dumps(ASCII_TOKENIZER))
    spec = tmp_path / "generate.toml"
    spec.write_text('tokenizer = "tokenizer.json"\n[[prompt]]\nfile = "text.txt"\nwindow = 60\n')
    ended = hil("run", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT, "--json")
    windows = [case["generation"]["perplexity"] for case in ended.document["cases"]]
    for window, part in zip(windows, (text[:60], text[60:]), strict=True):
        logits = run_exactly(list(part.encode()))
        chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        exact = -chances[np.arange(59), list(part.encode())[1:]].mean()
        assert window["tokens"] == 59 and window["reference_nats"] == pytest.approx(exact, rel=1e-6)
        assert window["board_nats"] == pytest.approx(exact, rel=1e-4)
    shown = hil("run", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT)
    assert "(text.txt): " in shown.err + shown.out and "over 118 tokens" in shown.err + shown.out


@pytest.mark.slow
def test_generation_rejects_fault_without_effect(hil, tmp_path):
    spec = write_spec(tmp_path, one=(PROMPT, []))
    ended = hil("run", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT, "--fault", "mask:how=show-next")
    assert ended.code == 2 and "fault mask: how=show-next needs a mask with a row per token" in ended.err


def test_generation_names_step_of_crash(generate):
    code, case = generate(*ORT, "--fault", "crash:position=20")
    assert (code, case["outcome"]) == (3, "RUN_CRASH")
    assert case["reason"] == "the worker was killed by SIGSEGV during run; the generation was at step 5, position 20"


def test_generation_names_step_of_hang(generate):
    code, case = generate(*ORT, "--fault", "hang:position=3", "--timeout", "3")
    assert (code, case["outcome"]) == (3, "TIMEOUT")
    assert case["reason"].endswith("was stopped; the generation was in the prompt, position 0")


def test_generation_reports_lost_board(generate):
    """The board is gone, so the step is unknown."""
    code, case = generate(*ORT, "--fault", "kill-agent:position=20")
    assert (code, case["outcome"], case["stage"]) == (4, "BOARD_LOST", "run") and "step" not in case["reason"]


def test_interrupted_generation_resumes(hil, environment, tmp_path):
    spec = write_spec(tmp_path, short=(PROMPT, FORCED[:4]), long=(PROMPT, FORCED))
    slow = ("--fault", "slow_token:position=30,seconds=1")
    command = ["run", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT, *slow]
    process = subprocess.Popen(
        [sys.executable, "-m", "hil.controller.cli.main", *map(str, command)],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
    )

    def stored() -> dict[str, Any]:
        found = list((tmp_path / "hil-runs").glob("*/run.json"))
        return json.loads(found[0].read_text()) if found else {"cases": []}

    eventually(lambda: any(case["stage"] == "run" for case in stored()["cases"][1:]), process=process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and b"--resume" in said and b"Traceback" not in said
    before = stored()
    assert [case["outcome"] for case in before["cases"]] == ["PASS", None]
    resumed = hil("run", "--resume", before["id"], "--json")
    assert [case["outcome"] for case in resumed.document["cases"]] == ["PASS", "PASS"]
    finished = [document["cases"][0]["provenance"]["finished_at"] for document in (before, resumed.document)]
    assert finished[0] == finished[1]


@pytest.mark.slow
def test_bisect_finds_wrong_operator_of_wrong_call(hil, tmp_path):
    spec = write_spec(tmp_path, right=(PROMPT[:3], FORCED[:2]), wrong=(PROMPT, FORCED))
    # The fault damages the cache of layer 2 in every call; the first call of the first prompt is therefore wrong.
    fault = ("--fault", "corrupt:output=present.2.value,others=spare")
    where = ("--runtime-hw-type", "sim", *ORT, "--isolated")
    found = hil("bisect", MODEL, "--generate", spec, *where, *fault, "--json")
    assert found.code == 1 and found.document["first_isolated"] == "Concat_present.2.value"
    (note,) = found.document["notes"]
    assert note.startswith("hil bisects the call of prompt right at positions 0 to 2: layer 1, in the prompt")


@pytest.mark.slow
def test_bisect_of_right_prompts_uses_last_call(hil, tmp_path):
    spec = write_spec(tmp_path, one=(PROMPT, FORCED[:3]))
    found = hil("bisect", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT, "--cumulative", "--json")
    assert found.code == 0
    assert found.document["notes"] == ["all prompts passed; hil bisects the last call of prompt one, position 18"]


def test_bundle_has_case_of_each_call(hil, tmp_path):
    spec = tmp_path / "generate.toml"
    spec.write_text(f'steps = 1\nchunk = 2\n[[prompt]]\nname = "one"\ntokens = {PROMPT[:3]}\n')
    where = ("--runtime-hw-type", "sim", *ORT)
    assert hil("bundle", "create", MODEL, "--generate", spec, *where, "-o", "calls.hilb").code == 0
    cases = hil("bundle", "run", "calls.hilb", "--json").document["cases"]
    calls = ["one-prompt-0", "one-prompt-2", "one-step-1"]
    assert [(case["name"].removeprefix("decoder-"), case["outcome"]) for case in cases] == [
        (name, "PASS") for name in calls
    ]
    failing = hil("bundle", "run", "calls.hilb", "--case", "one-step-1", "--fault", "corrupt:output=present.2.value")
    assert failing.code == 1 and "decoder-one-step-1" in failing.out


def test_bundle_refuses_reference_of_specification(hil, tmp_path):
    spec = tmp_path / "generate.toml"
    spec.write_text(f'reference = "{MODEL}"\n[[prompt]]\ntokens = {PROMPT}\n')
    ended = hil("bundle", "create", MODEL, "--generate", spec, "--runtime-hw-type", "sim", *ORT)
    assert ended.code == 2 and "a bundle does not support `reference`" in ended.err

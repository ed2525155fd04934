"""Read a generation specification (``--generate SPEC``): prompts, number of steps, and roles of inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hil.core.config_files import parse_toml
from hil.core.files import MAX_FILE_BYTES, read_file, read_text
from hil.core.steps import MAX_STEPS
from hil.core.text import numbered
from hil.errors import UsageError

# NAME.generate.toml next to NAME.onnx has the prompts of a model in a suite.
GENERATE = ".generate.toml"
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
_TEXT_HINT = "give token ids: tokens = [...], or name the tokenizer: tokenizer = 'tokenizer.json'"


class Prompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt, and the tokens that follow it.

    Attributes:
        forced: Tokens to run instead of those with the largest logits.
    """

    name: str = ""
    text: str = ""
    tokens: list[Token] = []
    forced_text: str = ""
    forced: list[Token] = []


class Roles(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names of inputs and outputs that hil cannot detect; "" is detected.

    Attributes:
        cache: Input -> output that returns its new content.
    """

    tokens: str = ""
    positions: str = ""
    mask: str = ""
    length: str = ""
    last: str = ""
    logits: str = ""
    cache: dict[str, str] = {}


class GenerateSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to generate tokens with a model.

    Attributes:
        steps: Maximum number of steps after the prompt.
        chunk: Number of the prompt's tokens per call; 0 is all.
        stop: Tokens that end the generation.
        tokenizer: Path of a ``tokenizer.json``, relative to the specification.
        reference: Path of an ONNX model that defines the right results, relative to the specification; "" is the model
            itself. Programs of other formats need it.
        lengths: Also run the first prompt cut to each of these lengths, as separate cases.
    """

    prompt: Annotated[list[Prompt], Meta(min_length=1)]
    steps: _Count = 32
    chunk: _Count = 0
    stop: list[Token] = []
    tokenizer: str = ""
    reference: str = ""
    lengths: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_STEPS)]], Meta(max_length=256)] = []
    roles: Roles = msgspec.field(default_factory=Roles)


def read_spec(path: Path) -> GenerateSpec:
    """Read a specification. All prompts then have a unique name and tokens.

    Raises:
        UsageError: The file is unreadable or invalid, or a text cannot be converted to tokens.
    """
    spec = _parse_spec(path)
    tokenizer = _load_tokenizer(path.parent / spec.tokenizer) if spec.tokenizer else None
    for prompt in spec.prompt:
        for kind, given in (("tokens", prompt.text), ("forced", prompt.forced_text)):
            if not given:
                continue
            if tokenizer is None:
                raise UsageError(f"{path}: the prompt {given[:40]!r} is a text", hint=_TEXT_HINT, option="--generate")
            if not getattr(prompt, kind):
                setattr(prompt, kind, _encode_text(tokenizer, given, path, is_prompt=kind == "tokens"))
        if not prompt.tokens:
            raise UsageError(f"{path}: a prompt has no tokens", hint=_TEXT_HINT, option="--generate")
    longest = spec.prompt[0]
    spec.prompt += [
        Prompt(
            name=f"{longest.name or 'length'}-{size}",
            tokens=longest.tokens[:size],
            forced=[*longest.tokens[size:], *longest.forced],
        )
        for size in _cut_lengths(spec.lengths, len(longest.tokens), path)
    ]
    names = numbered([prompt.name or f"prompt-{number}" for number, prompt in enumerate(spec.prompt, 1)])
    for prompt, name in zip(spec.prompt, names, strict=True):
        prompt.name = name
    return spec


def read_file_names(path: Path) -> tuple[str, str]:
    """Return the paths of tokenizer and reference in a specification, "" without one. Raises UsageError if invalid."""
    spec = _parse_spec(path)
    return spec.tokenizer, spec.reference


def _parse_spec(path: Path) -> GenerateSpec:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", option="--generate") from error
    try:
        return msgspec.convert(parse_toml(text, path), GenerateSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", hint="see docs/generation.md", option="--generate") from error


def _cut_lengths(lengths: list[int], most: int, path: Path) -> list[int]:
    if longest := [size for size in lengths if size > most]:
        raise UsageError(
            f"{path}: lengths has {longest[0]}, the first prompt has {most} tokens",
            hint="extend the first prompt",
            option="--generate",
        )
    return lengths


def _encode_text(tokenizer: Any, text: str, path: Path, *, is_prompt: bool) -> list[int]:
    """Convert a text to tokens, with the tokenizer's special tokens at the start of a prompt. Raises UsageError."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=is_prompt).ids)
    except Exception as error:  # the library raises plain exceptions
        raise UsageError(
            f"{path}: the tokenizer cannot convert {text[:40]!r}: {error}", hint=_TEXT_HINT, option="--generate"
        ) from error


def _load_tokenizer(path: Path) -> Any:
    """Load a tokenizer of the Hugging Face format. Raises UsageError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "converting text to tokens requires tokenizers, which is not installed",
            hint=f"pip install 'hil[generation]', or {_TEXT_HINT}",
        ) from error
    try:
        return Tokenizer.from_str(read_file(path, MAX_FILE_BYTES).decode())
    except Exception as error:
        raise UsageError(f"cannot read the tokenizer {path}: {error}", option="--generate") from error

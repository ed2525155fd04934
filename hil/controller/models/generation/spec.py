"""Read a generation specification (``--generate SPEC``): prompts, number of steps, and roles of inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hil.controller.models.sizing.sizes import list_edge_sizes, parse_range
from hil.core.config_files import parse_toml
from hil.core.files import MAX_FILE_BYTES, read_file, read_text
from hil.core.install_hints import make_install_command
from hil.core.steps import MAX_STEPS, join_turns
from hil.core.text import make_names_unique
from hil.errors import UsageError

# In a suite, NAME.generate.toml next to NAME.onnx contains the prompts of the model.
GENERATE = ".generate.toml"
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
# Name of a prompt that is cut to a length.
_LENGTH_NAME = "{}-{}"
_MAX_WINDOWS = 10_000
_MAX_DIGITS = 10
_TEXT_HINT = "give token ids: tokens = [...], or name the tokenizer: tokenizer = 'tokenizer.json'"


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Turn of a conversation: tokens of the user, and the tokens that follow.

    Attributes:
        forced: Tokens for the steps, in place of the tokens with the largest logits.
    """

    text: str = ""
    tokens: list[Token] = []
    forced_text: str = ""
    forced: list[Token] = []

    def count_steps(self, most: int) -> int:
        """Return the number of steps, at most ``most``."""
        return min(most, len(self.forced) or most)


class Prompt(Turn, kw_only=True, forbid_unknown_fields=True):
    """Prompt: the first turn of a conversation, and further turns.

    Attributes:
        file: Path of a text file, relative to the specification. The tokens of the text become the prompt and the
            forced tokens.
        window: Number of tokens of the file per prompt; 0 makes one prompt with all tokens.
    """

    name: str = ""
    file: str = ""
    window: _Count = 0
    turn: list[Turn] = []

    @property
    def turns(self) -> list[Turn]:
        """All turns."""
        return [self, *self.turn]

    def join_turns(self, steps: int) -> tuple[list[int], list[int]]:
        """Return the tokens and the forced tokens of all turns, separated by TURN_END."""
        forced = [turn.forced[:steps] for turn in self.turns if turn.forced]
        return join_turns(turn.tokens for turn in self.turns), join_turns(forced)


class Roles(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names of inputs and outputs that hil cannot detect; hil detects a name that is "".

    Attributes:
        bound: Number of positions of a cache with a fixed size.
        cache: Cache input -> output with the new content of this input.
    """

    tokens: str = ""
    positions: str = ""
    mask: str = ""
    length: str = ""
    last: str = ""
    logits: str = ""
    bound: _Count = 0
    cache: dict[str, str] = {}


class GenerateSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Specification of a generation.

    Attributes:
        steps: Maximum number of steps after the prompt of each turn.
        chunk: Number of prompt tokens per call; 0 runs the whole prompt in one call.
        stop: Tokens that end a turn.
        tokenizer: Path of a ``tokenizer.json``, relative to the specification.
        reference: Path of an ONNX model that defines the right results, relative to the specification; "" is the model
            itself. Required for models of other formats.
        lengths: Lengths to which the first prompt is cut, for additional cases. ``1..64`` is a range.
    """

    prompt: Annotated[list[Prompt], Meta(min_length=1)]
    steps: _Count = 32
    chunk: _Count = 0
    stop: list[Token] = []
    tokenizer: str = ""
    reference: str = ""
    lengths: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_STEPS)]], Meta(max_length=256)] | str = []
    roles: Roles = msgspec.field(default_factory=Roles)

    @property
    def cases(self) -> list[Prompt]:
        """All prompts, including the prompts that are cut to a length."""
        return [*self.prompt, *(cut_prompt(self.prompt[0], int(size)) for size in self.lengths)]


def read_spec(path: Path) -> GenerateSpec:
    """Read a specification. In the result, all prompts have a unique name and tokens, and lengths are numbers.

    Raises:
        UsageError: The file is unreadable or invalid, or a text cannot be converted to tokens.
    """
    spec = _parse_spec(path)
    files = tuple(path.parent / name for name in (spec.tokenizer, *(prompt.file for prompt in spec.prompt)) if name)
    return _complete_spec(path, msgspec.json.encode(spec), tuple(map(_stamp_file, files)))


@functools.lru_cache(maxsize=4)
def _complete_spec(path: Path, text: bytes, files: Hashable) -> GenerateSpec:
    """Return a specification with the tokens of all texts. The result is cached, because a run needs it for every case.

    Args:
        text: the specification as JSON.
        files: state of the tokenizer's and the texts' files, as part of the cache key.
    """
    spec = msgspec.json.decode(text, type=GenerateSpec)
    tokenizer = _load_tokenizer(path.parent / spec.tokenizer) if spec.tokenizer else None
    prompts: list[Prompt] = []
    for prompt in spec.prompt:
        for number, turn in enumerate(prompt.turns):
            _encode_turn(turn, tokenizer, path, is_first=number == 0)
        prompts += _read_windows(prompt, spec, tokenizer, path) if prompt.file else [prompt]
    for prompt in prompts:
        _check_turns(prompt, path)
    names = make_names_unique([prompt.name or f"prompt-{number}" for number, prompt in enumerate(prompts, 1)])
    for prompt, name in zip(prompts, names, strict=True):
        prompt.name = name
    spec.prompt, spec.lengths = prompts, _read_lengths(spec, prompts[0], path)
    if spec.lengths and (clash := [prompt.name for prompt in prompts[1:] if _parse_size(spec, prompt.name)]):
        raise UsageError(
            f"{path}: prompt {clash[0]!r} has the same name as a shortened copy of the first prompt",
            hint="rename one of the prompts",
            option="--generate",
        )
    return spec


def _stamp_file(path: Path) -> tuple[Path, int, int]:
    """Return the state of a file: path, modification time and size; zeros if the file is missing."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a null character
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


def cut_prompt(prompt: Prompt, size: int) -> Prompt:
    """Return a prompt with the first ``size`` tokens. The other tokens become forced tokens."""
    forced = [*prompt.tokens[size:], *prompt.forced]
    return Prompt(name=_LENGTH_NAME.format(prompt.name, size), tokens=prompt.tokens[:size], forced=forced)


def find_prompt(spec: GenerateSpec, name: str) -> Prompt | None:
    """Return the prompt with this name.

    ``NAME-LENGTH``, with the name of the first prompt, is this prompt cut to LENGTH tokens. Return None if unknown.
    """
    found = next((prompt for prompt in spec.prompt if prompt.name == name), None)
    size = _parse_size(spec, name)
    return cut_prompt(spec.prompt[0], size) if found is None and size else found


def _parse_size(spec: GenerateSpec, name: str) -> int:
    """Return the length in the name of a cut prompt (``NAME-LENGTH``); 0 for other names."""
    first = spec.prompt[0]
    size = name.removeprefix(_LENGTH_NAME.format(first.name, ""))
    is_size = size != name and size.isascii() and size.isdecimal() and len(size) < _MAX_DIGITS
    return int(size) if is_size and int(size) <= len(first.tokens) else 0


def read_file_names(path: Path) -> tuple[str, list[str]]:
    """Return the paths in a specification: of the reference ("" if not given), and of the tokenizer and texts.

    Raises UsageError for an invalid specification.
    """
    spec = _parse_spec(path)
    return spec.reference, [name for name in (spec.tokenizer, *(prompt.file for prompt in spec.prompt)) if name]


def _parse_spec(path: Path) -> GenerateSpec:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", option="--generate") from error
    try:
        return msgspec.convert(parse_toml(text, path), GenerateSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", hint="see docs/generation.md", option="--generate") from error


def _encode_turn(turn: Turn, tokenizer: Any, path: Path, *, is_first: bool) -> None:
    """Convert the texts of a turn to tokens. Raises UsageError."""
    for kind, given in (("tokens", turn.text), ("forced", turn.forced_text)):
        if given and not getattr(turn, kind):
            setattr(turn, kind, _encode_text(tokenizer, given, path, is_start=is_first and kind == "tokens"))


def _check_turns(prompt: Prompt, path: Path) -> None:
    """Raise UsageError for a turn without tokens, forced tokens in only some turns, or a window without a file."""
    if prompt.window and not prompt.file:
        raise UsageError(
            f"{path}: a prompt has a window, but no file", hint="set file, or remove window", option="--generate"
        )
    if not all(turn.tokens for turn in prompt.turns):
        raise UsageError(f"{path}: a prompt has no tokens", hint=_TEXT_HINT, option="--generate")
    if len({bool(turn.forced) for turn in prompt.turns}) > 1:
        raise UsageError(
            f"{path}: only some turns of a prompt have forced tokens",
            hint="set forced in all turns, or in none",
            option="--generate",
        )


def _read_windows(prompt: Prompt, spec: GenerateSpec, tokenizer: Any, path: Path) -> list[Prompt]:
    """Return a prompt for every window of a text file.

    The last tokens of a window are forced tokens: at most half, and at most one per step.
    """
    if prompt.tokens or prompt.forced or prompt.turn:
        raise UsageError(
            f"{path}: a prompt with a file also has tokens or turns",
            hint="remove the tokens and turns",
            option="--generate",
        )
    try:
        text = read_text(path.parent / prompt.file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot read the text {prompt.file}: {error}", option="--generate") from error
    tokens = _encode_text(tokenizer, text, path, is_start=True)
    if not tokens:
        raise UsageError(f"{path}: {prompt.file} has no tokens", option="--generate")
    size = prompt.window or len(tokens)
    windows = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    if len(windows) > _MAX_WINDOWS:
        raise UsageError(
            f"{path}: {prompt.file} has {len(windows)} windows, maximum {_MAX_WINDOWS}",
            hint="set a larger window, or use a shorter file",
            option="--generate",
        )
    name = prompt.name or Path(prompt.file).stem
    return [
        Prompt(
            name=f"{name}-window-{number}" if len(windows) > 1 else name,
            file=prompt.file,
            window=prompt.window,
            tokens=window[: len(window) - (steps := min(spec.steps, len(window) // 2))],
            forced=window[len(window) - steps :],
        )
        for number, window in enumerate(windows, 1)
    ]


def _read_lengths(spec: GenerateSpec, first: Prompt, path: Path) -> list[int]:
    """Return the lengths to which the first prompt is cut, in ascending order.

    Raises UsageError for invalid lengths.
    """
    most, lengths = len(first.tokens), spec.lengths
    if lengths and first.turn:
        raise UsageError(f"{path}: lengths requires a first prompt with a single turn", option="--generate")
    if isinstance(lengths, str):
        try:
            low, high = parse_range(lengths)
        except ValueError as error:
            raise UsageError(
                f"{path}: invalid lengths {lengths[:40]!r}", hint="give a range like 1..64", option="--generate"
            ) from error
        near_chunks = [spec.chunk + step for step in (-1, 0, 1) if low <= spec.chunk + step <= high and spec.chunk]
        lengths = [*list_edge_sizes(low, high), *near_chunks]
    if longest := [size for size in lengths if not 0 < size <= most]:
        raise UsageError(
            f"{path}: lengths contains {longest[0]}, but the first prompt has {most} tokens",
            hint="extend the first prompt",
            option="--generate",
        )
    return sorted({*lengths} - {most})


def _encode_text(tokenizer: Any, text: str, path: Path, *, is_start: bool) -> list[int]:
    """Convert a text to tokens, with the tokenizer's special tokens at the start of a prompt. Raises UsageError."""
    if tokenizer is None:
        raise UsageError(
            f"{path}: the prompt {text[:40]!r} is a text, but no tokenizer is set", hint=_TEXT_HINT, option="--generate"
        )
    try:
        return list(tokenizer.encode(text, add_special_tokens=is_start).ids)
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
            hint=f"{make_install_command('generation')}, or {_TEXT_HINT}",
        ) from error
    try:
        tokenizer = Tokenizer.from_str(read_file(path, MAX_FILE_BYTES).decode())
    except Exception as error:
        raise UsageError(f"cannot read the tokenizer {path}: {error}", option="--generate") from error
    # The file may contain limits from training: disable them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

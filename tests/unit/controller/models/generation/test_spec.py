"""Generation specifications: prompts as tokens and texts, lengths, names, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.models.generation.spec import GenerateSpec, find_prompt, read_file_names, read_spec
from hil.core.install_hints import make_install_command
from hil.errors import UsageError


def read(folder: Path, text: str) -> GenerateSpec:
    (folder / "spec.toml").write_text(text)
    return read_spec(folder / "spec.toml")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Write a tokenizer that maps words to numbers, and adds a token at the start of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "the": 1, "board": 2, "runs": 3, "<unk>": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_read_spec_reads_all_fields(tmp_path: Path):
    spec = read(
        tmp_path,
        """
steps = 5
chunk = 2
stop = [0, 3]
[[prompt]]
name = "a"
tokens = [1, 2]
forced = [3]
[roles]
tokens = "ids"
[roles.cache]
"in" = "out"
""",
    )
    assert (spec.steps, spec.chunk, spec.stop) == (5, 2, [0, 3])
    assert [(one.name, one.tokens, one.forced) for one in spec.prompt] == [("a", [1, 2], [3])]
    assert spec.roles.tokens == "ids" and spec.roles.cache == {"in": "out"}


def test_read_spec_has_defaults_and_unique_names(tmp_path: Path):
    prompts = '[[prompt]]\ntokens = [1]\n[[prompt]]\nname = "x"\ntokens = [2]\n[[prompt]]\nname = "x"\ntokens = [3]\n'
    spec = read(tmp_path, prompts)
    assert (spec.steps, spec.chunk, spec.stop, spec.lengths) == (32, 0, [], [])
    names = [one.name for one in spec.prompt]
    assert names[0] == "prompt-1" and len(set(names)) == 3


def test_read_spec_cuts_first_prompt_to_lengths(tmp_path: Path):
    text = 'lengths = [1, 3, 4]\n[[prompt]]\nname = "a"\ntokens = [5, 6, 7, 8]\n[[prompt]]\ntokens = [9]\n'
    spec = read(tmp_path, text)
    assert [(one.name, one.tokens, one.forced) for one in spec.cases[2:]] == [
        ("a-1", [5], [6, 7, 8]),
        ("a-3", [5, 6, 7], [8]),
    ]


def test_read_spec_reads_range_of_lengths(tmp_path: Path):
    text = f'lengths = "2..40"\nchunk = 21\n[[prompt]]\ntokens = {list(range(41))}\n'
    lengths = read(tmp_path, text).lengths
    assert {2, 3, 20, 21, 22, 40} <= {*lengths} and lengths == sorted(lengths) and max(lengths) == 40


def test_find_prompt_cuts_first_prompt(tmp_path: Path):
    spec = read(tmp_path, '[[prompt]]\nname = "a"\ntokens = [5, 6]\n[[prompt]]\nname = "a-1"\ntokens = [9]\n')
    found = [find_prompt(spec, name) for name in ("a", "a-1", "a-2", "a-0", "a-3", "b-1", "a-")]
    assert [one and one.tokens for one in found] == [[5, 6], [9], [5, 6], None, None, None, None]


def test_read_spec_reads_turns(tmp_path: Path, tokenizer: Path):
    text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\ntokens = [1]\nforced = [7, 8]\n'
    spec = read(tmp_path, text + '[[prompt.turn]]\ntext = "board"\nforced_text = "runs"\n')
    assert spec.prompt[0].join_turns(1) == ([1, -1, 2], [7, -1, 3])


def test_read_spec_adds_special_tokens_once(tmp_path: Path, tokenizer: Path):
    text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\ntext = "board"\n[[prompt.turn]]\ntext = "runs"\n'
    assert read(tmp_path, text).prompt[0].join_turns(9) == ([0, 2, -1, 3], [])


def test_read_spec_ignores_limits_of_tokenizer(tmp_path: Path, tokenizer: Path):
    tokenizers = pytest.importorskip("tokenizers")
    limited = tokenizers.Tokenizer.from_file(str(tokenizer))
    limited.enable_truncation(3)
    limited.enable_padding(length=9)
    limited.save(str(tokenizer))
    text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\ntext = "the board runs the"\n'
    assert read(tmp_path, text).prompt[0].tokens == [0, 1, 2, 3, 1]


def test_read_spec_rejects_file_without_tokens(tmp_path: Path, tokenizer: Path):
    tokenizers = pytest.importorskip("tokenizers")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    plain.save(str(tokenizer))
    (tmp_path / "text.txt").write_text("")
    for window in (0, 4):
        text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\nfile = "text.txt"\nwindow = {window}\n'
        with pytest.raises(UsageError, match=r"text\.txt has no tokens"):
            read(tmp_path, text)


def test_read_spec_reads_changed_text(tmp_path: Path, tokenizer: Path):
    text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\nfile = "text.txt"\n'
    (tmp_path / "text.txt").write_text("the board")
    assert read(tmp_path, text).prompt[0].join_turns(9) == ([0, 1], [2])
    (tmp_path / "text.txt").write_text("the board runs")
    assert read(tmp_path, text).prompt[0].join_turns(9) == ([0, 1], [2, 3])


def test_read_file_names_lists_texts(tmp_path: Path):
    (tmp_path / "s.toml").write_text('tokenizer = "t.json"\nreference = "r.onnx"\n[[prompt]]\nfile = "/etc/passwd"\n')
    assert read_file_names(tmp_path / "s.toml") == ("r.onnx", ["t.json", "/etc/passwd"])


def test_read_spec_cuts_text_file_into_windows(tmp_path: Path, tokenizer: Path):
    (tmp_path / "text.txt").write_text("the board runs the board runs the")
    text = f'steps = 1\ntokenizer = "{tokenizer.name}"\n[[prompt]]\nfile = "text.txt"\nwindow = 3\n'
    assert [(one.name, one.tokens, one.forced) for one in read(tmp_path, text).prompt] == [
        ("text-window-1", [0, 1], [2]),
        ("text-window-2", [3, 1], [2]),
        ("text-window-3", [3], [1]),
    ]


def test_read_spec_converts_texts(tmp_path: Path, tokenizer: Path):
    text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\ntext = "the board"\nforced_text = "runs fast"\n'
    (prompt,) = read(tmp_path, text).prompt
    assert prompt.tokens == [0, 1, 2], "with the token at the start"
    assert prompt.forced == [3, 4], "without it"


def test_read_spec_prefers_tokens_over_text(tmp_path: Path, tokenizer: Path):
    text = f'tokenizer = "{tokenizer.name}"\n[[prompt]]\ntext = "the board"\ntokens = [7]\n'
    assert read(tmp_path, text).prompt[0].tokens == [7]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "missing required field `prompt`", "docs/generation.md"),
        ("prompt = []", "length >= 1", "docs/generation.md"),
        ("[[prompt]]\n", "a prompt has no tokens", "tokens = [...]"),
        ("[[prompt]]\ntokens = []", "a prompt has no tokens", ""),
        ("[[prompt]]\ntokens = [-1]", ">= 0", ""),
        ("[[prompt]]\ntokens = [2147483648]", "<= 2147483647", ""),
        ("[[prompt]]\ntokens = [1.5]", "`int`", "docs/generation.md"),
        ("[[prompt]]\ntokens = [1]\ntoken = 3", "`token`", ""),
        ("[[prompt]]\ntext = 'the board'", "the prompt 'the board' is a text", "tokenizer.json"),
        ("[[prompt]]\ntokens = [1]\nforced_text = 'x'", "the prompt 'x' is a text", ""),
        ("steps = 65537\n[[prompt]]\ntokens = [1]", "<= 65536", ""),
        ("chunk = -1\n[[prompt]]\ntokens = [1]", ">= 0", ""),
        ("lengths = [2]\n[[prompt]]\ntokens = [1]", "lengths contains 2, but the first prompt has 1 tokens", "extend"),
        ("lengths = [0]\n[[prompt]]\ntokens = [1]", ">= 1", ""),
        ("lengths = '1-2'\n[[prompt]]\ntokens = [1]", "invalid lengths '1-2'", "1..64"),
        ("lengths = '0..1'\n[[prompt]]\ntokens = [1]", "lengths contains 0", "extend"),
        ("lengths = [1]\n[[prompt]]\ntokens = [1]\n[[prompt.turn]]\ntokens = [1]", "a single turn", ""),
        ("[[prompt]]\ntokens = [1]\n[[prompt.turn]]\nforced = [1]", "a prompt has no tokens", ""),
        ("[[prompt]]\ntokens = [1]\n[[prompt.turn]]\ntokens = [1]\nforced = [1]", "only some turns", "in none"),
        ("[[prompt]]\ntokens = [1]\nfile = 'a.txt'", "has tokens or turns", "remove"),
        (
            "lengths = [1]\n[[prompt]]\nname = 'a'\ntokens = [1, 2]\n[[prompt]]\nname = 'a-2'\ntokens = [3]",
            "'a-2'",
            "rename",
        ),
        ("[[prompt]]\ntokens = [1]\nwindow = 2", "a window, but no file", "file"),
        ('[[prompt]]\nfile = "a\\u0000"', "cannot read the text", ""),
        ("[[prompt]]\nfile = 'a.txt'", "cannot read the text a.txt", ""),
        ("[[prompt]]\nfile = 'spec.toml'", "is a text", "tokenizer"),
        (f"lengths = {[1] * 300}\n[[prompt]]\ntokens = [1]", "length <= 256", ""),
        ("[[prompt]]\ntokens = [1]\n[roles]\ninputs = 'x'", "`inputs`", ""),
        ("tokenizer = 'none.json'\n[[prompt]]\ntokens = [1]", "cannot read the tokenizer", ""),
        ("[[prompt", "spec.toml", ""),
    ],
)
def test_read_spec_rejects_invalid_files(tmp_path: Path, text: str, message: str, hint: str):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_read_spec_rejects_unreadable_files(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "spec.toml").write_bytes(content)
    with pytest.raises(UsageError, match="cannot read") as caught:
        read_spec(tmp_path / "spec.toml")
    assert caught.value.option == "--generate"


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"model": 5}'])
def test_read_spec_rejects_invalid_tokenizers(tmp_path: Path, content: str):
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UsageError, match=r"cannot read the tokenizer .*t\.json"):
        read(tmp_path, "tokenizer = 't.json'\n[[prompt]]\ntext = 'x'\n")


def test_read_spec_names_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match="requires tokenizers") as caught:
        read(tmp_path, "tokenizer = 't.json'\n[[prompt]]\ntext = 'x'\n")
    assert make_install_command("generation") in caught.value.hint

"""XLA dumps and their file names, without TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.models.tensorflow.hlo import make_dump_environment


def dump(flags: dict[str, str], *names: str) -> None:
    (place,) = [flag.partition("=")[2] for flag in flags["XLA_FLAGS"].split() if flag.startswith("--xla_dump_to=")]
    for name in names:
        Path(place, name).write_text(name)


def test_dumped_modules_are_renamed_by_stage(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with make_dump_environment(str(tmp_path), passes=True) as flags:
        assert flags["XLA_FLAGS"].startswith("--xla_cpu_enable_fast_math=true --xla_dump_to=")
        assert "--xla_dump_hlo_as_text" in flags["XLA_FLAGS"] and "--xla_dump_hlo_as_dot" in flags["XLA_FLAGS"]
        dump(
            flags,
            *(f"module_0001.a_inference_flat_4__.2.before_optimizations.{kind}" for kind in ("txt", "dot")),
            "module_0001.a_inference_flat_4__.2.cpu_after_optimizations.txt",
            "module_0001.a_inference_flat_4__.2.0003.simplification.after_dce.before_cse.txt",
            "module_0001.a_inference_flat_4__.2.ir-no-opt.ll",
        )
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "after_optimizations.txt",
        "before_optimizations.dot",
        "before_optimizations.txt",
        "passes/0003.simplification.after_dce.before_cse.txt",
    ]


def test_multiple_dumped_modules_keep_numbers(tmp_path):
    with make_dump_environment(str(tmp_path)) as flags:
        assert "pass_re" not in flags["XLA_FLAGS"]
        dump(flags, "module_0000.f.before_optimizations.txt", "module_0001.g.before_optimizations.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000.before_optimizations.txt",
        "0001.before_optimizations.txt",
    ]


@pytest.mark.parametrize("passes", [True, False])
def test_dumping_without_directory_sets_empty_flags(passes):
    with make_dump_environment("", passes) as flags:
        assert flags == {}

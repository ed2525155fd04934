"""Datasets in all layouts, and damaged datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.numpy_helper
import pytest

from hil.controller.workloads.evaluation.datasets import open_dataset
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

X = (TensorSpec("x", "float32", (1, 2)),)
XZ = (*X, TensorSpec("z", "float32", (2,)))
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_archive_keeps_leading_dimension(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=ROWS, z=ROWS, labels=[7, 8, 9])
    sample = open_dataset(tmp_path / "d.npz").read(1, XZ)
    assert (sample.name, sample.label) == ("1", 8)
    assert sample.inputs["x"].tolist() == [[2, 3]]
    assert sample.inputs["z"].tolist() == [2, 3]


def test_single_array_serves_single_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=ROWS, label=[7, 8, 9])
    assert open_dataset(tmp_path / "d.npz").read(2, X).inputs["x"].tolist() == [[4, 5]]


def save_sample(folder: Path, label: str = "label.txt", text: str = "3", **arrays: np.ndarray) -> None:
    folder.mkdir(parents=True)
    (folder / label).write_text(text)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def test_folder_reads_samples_in_natural_order(tmp_path: Path) -> None:
    save_sample(tmp_path / "s10", input_0=ROWS[:1], z=ROWS[0])
    save_sample(tmp_path / "s9", "label.json", '{"a": 1}', x=ROWS[1:2], input_1=ROWS[1])
    dataset = open_dataset(tmp_path)
    assert dataset.names == ["s9", "s10"]
    first, second = dataset.read(0, XZ), dataset.read(1, XZ)
    assert (first.label, second.label) == ({"a": 1}, "3")
    assert first.inputs["x"].tolist() == [[2, 3]] and second.inputs["z"].tolist() == [0, 1]


def test_folder_reads_test_data_of_onnx(tmp_path: Path) -> None:
    folder = tmp_path / "test_data_set_0"
    folder.mkdir()
    (tmp_path / "model.onnx").write_text("")
    for name, array in (("input_0", ROWS[:1]), ("output_0", ROWS[1:2])):
        (folder / f"{name}.pb").write_bytes(onnx.numpy_helper.from_array(array, name).SerializeToString())
    sample = open_dataset(tmp_path).read(0, X)
    assert sample.inputs["x"].tolist() == [[0, 1]] and sample.label.tolist() == [[2, 3]]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_index_names_files_and_labels(suffix: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS[:1])
    np.save(tmp_path / "l.npy", ROWS[1])
    if suffix == "csv":
        text = "id,x,label\nfirst,a.npy,4\nsecond,a.npy,l.npy\nthird,a.npy,two words\n"
    else:
        labels = {"first": 4, "second": "l.npy", "third": "two words"}
        text = "".join(json.dumps({"id": key, "x": "a.npy", "label": one}) + "\n" for key, one in labels.items())
    (tmp_path / f"d.{suffix}").write_text(text)
    dataset = open_dataset(tmp_path / f"d.{suffix}")
    assert dataset.names == ["first", "second", "third"]
    samples = [dataset.read(number, X) for number in range(3)]
    assert str(samples[0].label) == "4" and samples[1].label.tolist() == [2, 3] and samples[2].label == "two words"
    assert samples[0].inputs["x"].tolist() == [[0, 1]]


def test_numbers_in_text_labels_are_kept_as_text(tmp_path: Path) -> None:
    labels = ["1984", "nan", "inf", "1_000", "007"]
    (tmp_path / "d.csv").write_text("x,label\n" + "".join(f"a.npy,{label}\n" for label in labels))
    np.save(tmp_path / "a.npy", ROWS[:1])
    dataset = open_dataset(tmp_path / "d.csv")
    assert [dataset.read(number, X).label for number in range(5)] == labels


def test_jsonl_labels_may_have_unicode_line_ends(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS[:1])
    row = json.dumps({"x": "a.npy", "label": "one\u2028two\u0085three"}, ensure_ascii=False)
    (tmp_path / "d.jsonl").write_text(f"{row}\r\n\n{row}\n", encoding="utf-8")
    dataset = open_dataset(tmp_path / "d.jsonl")
    assert [dataset.read(number, X).label for number in range(2)] == ["one\u2028two\u0085three"] * 2


@pytest.mark.parametrize("row", ['"/etc/x.npy","1"', '"../x.npy","1"', '"link.npy","1"', '"a.npy","../x.json"'])
def test_index_cannot_name_files_elsewhere(row: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for file in (folder / "a.npy", tmp_path / "x.npy"):
        np.save(file, ROWS[:1])
    (tmp_path / "x.json").write_text("1")
    (folder / "link.npy").symlink_to(tmp_path / "x.npy")
    (folder / "d.csv").write_text(f"x,label\n{row}\n")
    with pytest.raises(UsageError, match=r"sample 0: .* points outside"):
        open_dataset(folder / "d.csv").read(0, X)


def test_digest_depends_on_labels(tmp_path: Path) -> None:
    def digest(name: str) -> str:
        return open_dataset(tmp_path / name).digest_contents()

    found = set()
    for label in ("1", "2"):
        (tmp_path / "l.json").write_text(label)
        (tmp_path / "d.jsonl").write_text('{"x": "a.npy", "label": "l.json"}\n')
        (tmp_path / "d.csv").write_text(f"x,label\na.npy,{label}\n")
        np.savez(tmp_path / "d.npz", x=ROWS[:1], label=[int(label)])
        found |= {digest("d.jsonl"), digest("d.csv"), digest("d.npz")}
        save_sample(tmp_path / label / "s", text=label)
        found.add(digest(label))
    assert len(found) == 8


def test_other_files_use_loader(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("5")
    (tmp_path / "d.csv").write_text("x,label\na.png,1\n")
    dataset = open_dataset(tmp_path / "d.csv", lambda path: np.full((1, 2), float(path.read_text())))
    assert dataset.read(0, X).inputs["x"].tolist() == [[5, 5]]

    def fail(path: Path) -> None:
        raise SystemExit("no decoder")

    with pytest.raises(UsageError, match=r"load failed for .*a\.png: SystemExit: no decoder"):
        open_dataset(tmp_path / "d.csv", fail).read(0, X)
    with pytest.raises(UsageError, match=r"expected a \.npy or \.pb file"):
        open_dataset(tmp_path / "d.csv").read(0, X)


def write_text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


def write_archive(**arrays: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.savez(folder / "d.npz", **arrays)
        return folder / "d.npz"

    return write


def write_sample(**files: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "s").mkdir()
        for name, text in files.items():
            (folder / "s" / name.replace("_npy", ".npy").replace("_json", ".json")).write_text(text)
        return folder

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "no such dataset"),
        (lambda folder: folder, "no samples"),
        (write_text("d.parquet", ""), "unknown dataset format"),
        (write_text("input_0.npy", ""), "unknown dataset format"),
        (write_text("d.npz", "x"), "not a readable"),
        (write_archive(x=ROWS), "no array 'label'"),
        (write_archive(x=ROWS, label=[1]), "different numbers of samples"),
        (write_archive(x=ROWS[:0], label=[]), "no samples"),
        (write_archive(y=ROWS, w=ROWS, label=[1, 2, 3]), "missing input 'x'"),
        (write_text("d.csv", "x,label\na.npy\n"), "row 2"),
        (write_text("d.csv", "x\na.npy\n"), "missing 'label'"),
        (write_text("d.csv", "x,label\nnone.npy,1\n"), "no such file"),
        (write_text("d.csv", 'x,label\n"a,1\n'), "cannot read"),
        (write_text("d.csv", "id,x,label\na,b.npy,1\na,b.npy,2\n"), "several samples with the name 'a'"),
        (write_text("d.jsonl", "{"), "line 1 is not JSON"),
        (write_text("d.jsonl", "[1]"), "expected a JSON object"),
        (write_text("d.jsonl", '{"x": 3, "label": 1}'), "expected a file name"),
        (write_sample(), "no file for input 'x'"),
        (write_sample(input_0_npy="x", label_json="1"), "not a readable"),
        (write_sample(x_npy="x", label_json="{"), "not a readable|cannot read label"),
    ],
)
def test_damaged_datasets_raise_usage_errors(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        open_dataset(make(tmp_path)).read(0, X)


def test_sample_without_label_is_reported(tmp_path: Path) -> None:
    save_sample(tmp_path / "s", "other.txt", input_0=ROWS[:1])
    with pytest.raises(UsageError, match="no label"):
        open_dataset(tmp_path).read(0, X)
    with pytest.raises(UsageError, match="is a sample, not a dataset"):
        open_dataset(tmp_path / "s")

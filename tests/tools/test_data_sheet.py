from pathlib import Path

import pytest

from cupaged.kernels.launch import SOURCES, parameters
from tools.data_sheet import evaluate, read

SHEET = """// made_up.cu: one sentence.
//   x, out     T[num_rows, hidden_size]
//   -D         ELEMENT
//
// kernel first
//   grid       num_rows, block THREADS
//   bytes      num_rows * 2 * hidden_size * sizeof_T
//              + sum(ceil_div(n, BLOCK_SIZE) for n in seq_lens) * 4
//   flops      num_rows * 4 * hidden_size
//   registers  40
//   shared     32
//
// kernel second
//   grid       1
//   bytes      0
//   flops      0
//   registers  255 if HEAD_DIM > 128 else 128
//   shared     (16 + 64) * HEAD_DIM
#include "gpu.cuh"
//   bytes      1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "made_up.cu").write_text(SHEET)
    return tmp_path


def test_expressions_continue_and_see_lists_constants_and_the_element_size(folder: Path) -> None:
    sheet = read("made_up", folder)["first"]

    variables = {
        "ELEMENT": "bf16",
        "num_rows": 3,
        "hidden_size": 64,
        "BLOCK_SIZE": 16,
        "seq_lens": [1, 16, 17],
    }

    assert sheet.evaluate("bytes", variables) == 3 * 2 * 64 * 2 + (1 + 1 + 2) * 4
    assert sheet.evaluate("flops", variables) == 3 * 4 * 64


def test_each_kernel_has_its_own_fields_and_the_head_ends_with_the_comment(folder: Path) -> None:
    sheets = read("made_up", folder)

    assert list(sheets) == ["first", "second"]
    assert sheets["second"].evaluate("registers", {"HEAD_DIM": 192}) == 255
    assert sheets["second"].evaluate("shared", {"HEAD_DIM": 64}) == 80 * 64
    assert sheets["second"].evaluate("bytes", {}) == 0


def test_unique_bytes_are_the_bytes_unless_the_sheet_says_otherwise(folder: Path) -> None:
    (folder / "rereads.cu").write_text(
        SHEET.replace("//   bytes      0", "//   bytes      300\n//   unique     100")
    )

    assert read("rereads", folder)["second"].evaluate("unique", {}) == 100
    assert read("made_up", folder)["second"].evaluate("unique", {}) == 0


def test_a_missing_field_is_named(folder: Path) -> None:
    (folder / "bad.cu").write_text(SHEET.replace("//   flops      0\n", ""))

    with pytest.raises(ValueError, match=r"bad\.cu: the data sheet of kernel second lacks \['flops'\]"):
        read("bad", folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_row * 2", "'num_row' is unknown; known are"),
        ("2 *", "is not an expression"),
        ("open('x')", "calls none of"),
        ("(1).__class__", "a Attribute in"),
        ("lambda: 1", "a Lambda in"),
        ("num_rows / 2", "must be a whole number"),
        ("0 - num_rows", "not negative"),
    ],
)
def test_what_an_expression_may_not_have(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(text, {"num_rows": 3}, "made_up.cu, kernel first, bytes")


@pytest.mark.parametrize("file", sorted(path.stem for path in SOURCES.glob("*.cu")))
def test_every_kernel_has_a_data_sheet(file: str) -> None:
    kernels = parameters((SOURCES / f"{file}.cu").read_text())

    assert set(read(file)) == set(kernels)

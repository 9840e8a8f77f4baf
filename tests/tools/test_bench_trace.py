"""bench_trace: it measures two schedulers that do the same, and the bytes that one of them writes."""

from pathlib import Path

import pytest

from cupaged.trace.records import Kind, read_records
from tools.bench_trace import NUM_WARM_STEPS, measure


@pytest.mark.parametrize("num_output", [None, 16])
def test_a_row_is_of_steps_that_were_recorded(tmp_path: Path, num_output: int | None) -> None:
    row = measure(4, tmp_path, num_output=num_output, num_steps=5)

    (path,) = tmp_path.iterdir()
    kinds = [record.kind for record in read_records(path).records]
    assert kinds.count(Kind.PLAN) == NUM_WARM_STEPS + 5
    assert row["running"] == 4
    assert row["plain_us"] > 0
    assert 20 < row["bytes_a_step"] < 500

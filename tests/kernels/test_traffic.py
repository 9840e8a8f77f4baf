"""What kernels move and compute, counted by the emulator, against their data sheets and against the ideal."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cupaged.kernels.launch import SOURCES
from tests.cuda_on_cpu.count import Event
from tools.kernel_cases import TRAFFIC
from tools.kernel_cases.case import Case
from tools.kernel_cases.paged import Heads, Paging
from tools.kernel_cases.paged_decode import paged_decode
from tools.kernel_cases.paged_prefill import paged_prefill
from tools.kernel_cases.rms_norm import rms_norm
from tools.kernel_counts import Counted, count

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
ATTENTION = [
    *(paged_decode(Heads("bf16", 8, 2, head_dim), Paging((17, 640))) for head_dim in HEAD_DIMS),
    *(paged_prefill(Heads("bf16", 8, 2, head_dim), Paging((17, 97)), (5, 70)) for head_dim in HEAD_DIMS),
]

_counted: dict[str, list[Counted]] = {}  # by case


def count_once(case: Case) -> list[Counted]:
    if case.name not in _counted:
        _counted[case.name] = count(case)
    return _counted[case.name]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


def wrong_bytes(counted: Counted) -> str:
    """Return what is wrong with a sheet's `bytes` and `unique`; "" = nothing."""
    counts = counted.counts
    found = []
    for field, moved in (("bytes", counts.bytes_moved), ("unique", counts.launch_bytes)):
        said = counted.says(field)
        if not 0.9 * said <= moved <= 1.05 * said:
            found.append(f"{counted.launch.kernel} moves {moved} bytes, its sheet says {field} {said}")
    return "; ".join(found)


def imperfect_lines(counted: Counted, *events: Event) -> list[str]:
    """Return the lines whose events have conflicts or half-used sectors, or go by less than 16 bytes."""
    return [
        f"{source}: efficiency {found.efficiency:.2f}, widths {sorted(found.widths)}"
        for source, found in counted.counts.at(*events).items()
        if found.efficiency < 1.0 or found.widths != {16}
    ]


@named(TRAFFIC)
def test_bytes_are_those_of_the_data_sheet(case: Case) -> None:
    assert [wrong_bytes(counted) for counted in count_once(case) if wrong_bytes(counted)] == []


@named([case for case in TRAFFIC if case.attention])
def test_flops_of_tensor_cores_are_those_of_the_data_sheet(case: Case) -> None:
    counted = count_once(case)[0]  # the second of paged_decode's two kernels has no mma.sync

    assert counted.counts.flops == pytest.approx(counted.says("flops"), rel=0.05)


@named(ATTENTION)
def test_keys_and_values_are_read_by_whole_sectors_in_16_byte_accesses(case: Case) -> None:
    counted = count_once(case)[0]

    assert imperfect_lines(counted, Event.COPY_SOURCE) == []
    assert counted.counts.total(Event.COPY_SOURCE).requests > 0
    assert counted.counts.total(Event.GLOBAL_LOAD).widths <= {4}  # tables and lengths


@named(ATTENTION)
def test_matrix_loads_and_async_copies_have_no_bank_conflict(case: Case) -> None:
    counted = count_once(case)[0]

    assert counted.counts.total(Event.LOAD_MATRICES).requests > 0
    assert imperfect_lines(counted, Event.LOAD_MATRICES, Event.COPY_DESTINATION) == []


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the kernels' sources, to plant faults in."""
    for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")):
        shutil.copy(path, tmp_path)
    return tmp_path


def plant(sources: Path, file: str, text: str, fault: str) -> None:
    source = (sources / file).read_text()
    assert text in source
    (sources / file).write_text(source.replace(text, fault))


def test_rows_without_padding_are_noticed(sources: Path) -> None:
    plant(sources, "attention.cuh", "ROW_STRIDE = HEAD_DIM + 8", "ROW_STRIDE = HEAD_DIM")

    [counted] = count(replace(ATTENTION[0], sources=sources))[:1]

    assert imperfect_lines(counted, Event.LOAD_MATRICES) != []


def test_strided_loads_are_noticed(sources: Path) -> None:
    plant(sources, "rms_norm.cu", "threadIdx.x + i * THREADS", "HELD * threadIdx.x + i")

    [counted] = count(replace(rms_norm("bf16", 8, 4096), sources=sources))

    assert "moves" in wrong_bytes(counted)
    assert imperfect_lines(counted, Event.GLOBAL_LOAD) != []

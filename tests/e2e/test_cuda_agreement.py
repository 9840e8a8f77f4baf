"""The whole engine on an emulated GPU agrees with the CPU backend, by the rule of tools/agreement.py."""

from functools import partial
from pathlib import Path
from typing import cast

import pytest

from cupaged.backend.base import Backend
from cupaged.backend.cuda import CudaBackend
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.e2e.emulated import MEMORY, create_emulated
from tests.e2e.faults import FAULTS, Fault, FaultyBackend
from tools.agreement import WAYS, Trace, compare, follow, reference, tolerance
from tools.make_tiny_model import CLEAR_CASES, write_clear_model


@pytest.mark.parametrize(
    ("case", "way", "mode"),
    [
        # In check, what launches every kernel but copy_blocks, and what launches that.
        *((case, "recomputed", "check") for case in CLEAR_CASES),
        ("clear_llama", "forked", "check"),
        ("clear_mistral", "forked", "fast"),
        *((case, way, "fast") for case in ("clear_llama", "clear_mistral") for way in ("swapped", "cached")),
    ],
)
def test_agrees_through_chunks_and_mixed_batches_in_every_way(
    tmp_path: Path, case: str, way: str, mode: str
) -> None:
    write_clear_model(tmp_path, CLEAR_CASES[case])
    lead = reference(tmp_path)
    create_backend = partial(create_emulated, gpu=EmulatedGpu(mode, memory=MEMORY))

    trace = follow(tmp_path, lead, create_backend, WAYS[way])

    agreement = compare(lead, trace, tolerance(tmp_path))
    print(f"{case}, {way}: {agreement}")
    assert agreement.problems == []
    assert trace.num_chunks > 5
    assert trace.num_mixed_steps > 5


@pytest.fixture(scope="module")
def lead(clear_dir: Path) -> Trace:
    return reference(clear_dir)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_breaks_the_rule(clear_dir: Path, lead: Trace, fault: Fault) -> None:
    faulty = FaultyBackend(CudaBackend(EmulatedGpu(memory=MEMORY), "bfloat16"), fault)

    trace = follow(clear_dir, lead, lambda config, dtype: cast(Backend, faulty))  # noqa: ARG005

    assert faulty.num_faults > 0
    assert any("logits differ" in problem for problem in compare(lead, trace, tolerance(clear_dir)).problems)

"""The rule: it holds for the same arithmetic in other company, and no planted fault passes it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Backend
from cupaged.backend.cpu import CpuBackend
from cupaged.config import EngineConfig
from cupaged.scheduler.counters import create_counters
from tests.e2e.faults import FAULTS, Fault, FaultyBackend
from tools.agreement import WAYS, Agreement, Trace, compare, follow, reference, tolerance
from tools.make_tiny_model import CLEAR_CASES, write_clear_model


@pytest.fixture(scope="module")
def lead(clear_dir: Path) -> Trace:
    return reference(clear_dir)


def create_cpu(config: EngineConfig, dtype: str) -> Backend:  # noqa: ARG001
    return CpuBackend(dtype, 1)


def test_cpu_led_through_chunks_and_preemption_has_the_references_bits(clear_dir: Path, lead: Trace) -> None:
    trace = follow(clear_dir, lead, create_cpu)

    assert np.array_equal(trace.logits, lead.logits)
    assert np.array_equal(trace.token_ids, lead.token_ids)
    assert lead.num_chunks == lead.num_preemptions == 0
    assert trace.num_chunks > 10
    assert trace.num_mixed_steps > 5
    assert trace.num_preemptions > 0


@pytest.mark.parametrize("way", ["swapped", "cached", "forked"])
def test_cpu_led_in_any_way_has_the_references_bits(clear_dir: Path, lead: Trace, way: str) -> None:
    trace = follow(clear_dir, lead, create_cpu, WAYS[way])

    num_copies = WAYS[way].num_rounds * WAYS[way].num_sequences
    assert np.array_equal(trace.logits, np.tile(lead.logits, (num_copies, 1)))
    assert np.array_equal(trace.token_ids, np.tile(lead.token_ids, num_copies))


def test_a_way_in_which_nothing_happens_is_no_proof(clear_dir: Path, lead: Trace) -> None:
    way = replace(WAYS["swapped"], num_blocks=999)

    with pytest.raises(AssertionError, match="SWAPPED_OUT_BLOCKS are 0"):
        follow(clear_dir, lead, create_cpu, way)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_breaks_the_rule(clear_dir: Path, lead: Trace, fault: Fault) -> None:
    backend = FaultyBackend(CpuBackend("bfloat16", 1), fault)

    trace = follow(clear_dir, lead, lambda config, dtype: cast(Backend, backend))  # noqa: ARG005

    agreement = compare(lead, trace, tolerance(clear_dir))
    assert backend.num_faults > 0
    assert agreement.largest > 3 * agreement.tolerance
    assert any("logits differ" in problem for problem in agreement.problems)


class Forgetful:
    """A backend that does not do one thing."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend, self._name = backend, name

    def __getattr__(self, name: str) -> Any:
        """Return all else as the backend has it."""
        return (lambda *_: None) if name == self._name else getattr(self._backend, name)


@pytest.mark.parametrize(
    ("way", "forgotten"), [("swapped", "swap_out"), ("swapped", "swap_in"), ("forked", "copy_blocks")]
)
def test_blocks_that_are_not_moved_break_the_rule(
    clear_dir: Path, lead: Trace, way: str, forgotten: str
) -> None:
    backend = cast(Backend, Forgetful(CpuBackend("bfloat16", 1), forgotten))

    trace = follow(clear_dir, lead, lambda config, dtype: backend, WAYS[way])  # noqa: ARG005

    assert any("logits differ" in said for said in compare(lead, trace, tolerance(clear_dir)).problems)


@pytest.mark.parametrize("case", CLEAR_CASES)
def test_few_positions_are_too_near_to_tell(tmp_path: Path, case: str) -> None:
    write_clear_model(tmp_path, CLEAR_CASES[case])
    lead = reference(tmp_path)

    agreement = compare(lead, lead, tolerance(tmp_path))

    assert agreement.problems == []


LOGITS = np.array([[4.0, 0.0, -4.0], [0.0, 0.1, -3.0], [0.0, -2.0, 2.0]], np.float32)
LEAD = Trace(LOGITS, np.array([0, 1, 2], np.int32), 0, 0, create_counters())


def agreement_with(logits: NDArray[np.float32] = LOGITS, token_ids: list[int] | None = None) -> Agreement:
    """Apply the rule to a trace that differs from LEAD, with a tolerance of a tenth of the spread."""
    ids = LEAD.token_ids if token_ids is None else np.array(token_ids, np.int32)
    return compare(LEAD, LEAD._replace(logits=logits, token_ids=ids), 0.1)


def test_token_that_differs_where_two_logits_are_near_is_excluded() -> None:
    agreement = agreement_with(token_ids=[0, 0, 2])

    assert (agreement.num_excluded, agreement.num_different) == (1, 0)
    assert agreement.problems == ["33.3% of positions are too near to tell, over 3%"]


def test_token_that_differs_elsewhere_is_told() -> None:
    agreement = agreement_with(token_ids=[0, 1, 1])

    assert agreement.num_different == 1
    assert "1 of 3 tokens differ" in agreement.problems
    assert "1 of 3 tokens differ" in str(agreement)


def test_each_round_and_sequence_is_held_to_the_same_rows() -> None:
    twice = LEAD._replace(logits=np.tile(LOGITS, (2, 1)), token_ids=np.array([0, 1, 2, 0, 1, 1], np.int32))

    agreement = compare(LEAD, twice, 0.1)

    assert (agreement.num_samples, agreement.num_different, agreement.largest) == (6, 1, 0)


def test_difference_is_measured_against_the_spread() -> None:
    spread = LOGITS.std(axis=1).mean()

    assert agreement_with(LOGITS + 0.09 * spread).largest < 0.1 * spread
    assert "logits differ" in agreement_with(LOGITS + 0.11 * spread).problems[0]


def test_logits_that_are_not_finite_or_were_never_computed_differ() -> None:
    logits = LOGITS.copy()
    logits[1, 1] = np.nan

    assert "logits differ by up to nan" in agreement_with(logits).problems[0]

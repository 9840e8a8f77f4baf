"""LLMEngine with a trace: a busy run in a tiny pool is replayed; what is there already stays."""

from pathlib import Path

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.scheduler.counters import Counter
from cupaged.trace.records import read_records
from cupaged.trace.replay import replay
from cupaged.trace.workload import read_segments
from tests.engine.conftest import MakeEngine, finish
from tests.engine.test_beams_in_engine import add_beams
from tests.engine.test_group_workloads import Workload


@pytest.mark.parametrize("late", [False, True])
def test_a_recorded_run_has_the_same_plans_again(make_engine: MakeEngine, tmp_path: Path, late: bool) -> None:
    path = tmp_path / "run.trace"
    engine = make_engine(
        num_blocks=18,
        num_host_blocks=24,
        late=late,
        max_model_len=96,
        scheduling_policy="priority",
        trace=str(path),
    )
    Workload(0).run(engine)
    add_beams(engine, "beams")
    finish(engine)
    engine.close()

    (segment,) = read_segments(read_records(path))
    *_, last = replay(segment)

    counted = engine.get_metrics()
    for counter in Counter:
        assert last.scheduler.counters[counter] == counted[counter.name.lower()], counter
    assert counted["preemptions"] > 0


def test_a_trace_that_is_there_already_is_refused_before_the_model_is_loaded(
    scripted_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.trace"
    path.write_bytes(b"another run's")

    def load(_config: EngineConfig, _directory: Path) -> None:
        raise AssertionError("the model was loaded")

    with pytest.raises(ValueError, match=r"run\.trace exists already"):
        LLMEngine(EngineConfig.create(scripted_dir, trace=str(path)), create_executor=load)  # type: ignore[arg-type]

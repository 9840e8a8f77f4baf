"""The recorder keeps of a request only what it still has to write."""

from pathlib import Path

from numba.core import event

from cupaged.scheduler.warm_up import warm_up
from cupaged.trace.recorder import TraceRecorder
from cupaged.trace.records import TraceFile
from tests.scheduler.groups import make_group
from tests.trace.runs import Run, small_config


def test_the_chains_of_a_beam_search_go_with_it(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "a.trace", with_text=False)
    recorder = TraceRecorder(small_config(), None, trace)
    run = Run(recorder, seed=0, ends_every=1000)
    run.add(make_group(8, 6, n=2, is_beam=True))

    num_chains = []
    while recorder.has_unfinished():
        run.step()
        num_chains.append(len(recorder._beam_chains))
    trace.close()

    assert max(num_chains) == 1
    assert num_chains[-1] == 0


def test_nothing_is_compiled_while_requests_run(tmp_path: Path) -> None:
    warm_up()
    trace = TraceFile(tmp_path / "a.trace", with_text=True)
    recorder = TraceRecorder(small_config(), None, trace)
    run = Run(recorder, seed=0)
    with event.install_recorder("numba:compile") as compiled:
        run.add(make_group(8, 6, n=2))
        while recorder.has_unfinished():
            run.step()
        recorder.reset_prefix_cache()
    trace.close()

    assert [each.data["dispatcher"].py_func.__name__ for _, each in compiled.buffer] == []

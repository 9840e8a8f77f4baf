"""After warm_up, whatever a workload does, nothing is left to compile."""

import importlib
import pkgutil

import numba

import cupaged.scheduler
from cupaged.scheduler.warm_up import warm_up
from tests.scheduler.groups import make_group
from tests.scheduler.harness import preempting, start


def num_compiled() -> dict[str, int]:
    """Return how many versions of each njit function of the scheduler there are."""
    return {
        f"{module.__name__}.{name}": len(function.signatures)
        for info in pkgutil.iter_modules(cupaged.scheduler.__path__)
        for module in [importlib.import_module(f"cupaged.scheduler.{info.name}")]
        for name, function in vars(module).items()
        if isinstance(function, numba.core.dispatcher.Dispatcher)
    }


def test_nothing_is_compiled_after_it() -> None:
    warm_up()
    before = num_compiled()

    for mode in ("swap", "recompute"):
        harness, _ = preempting(preemption_mode=mode, num_host_blocks=8, sliding_window=6)
        harness.run()
    harness = start(make_group(6, n=3), make_group(6, n=3, is_beam=True), enable_prefix_caching=True)
    harness.run()
    harness.scheduler.reset_prefix_cache()

    assert num_compiled() == before

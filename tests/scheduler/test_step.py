"""Words that a scheduler makes are read as what they are."""

from typing import Any

import numba as _numba

from cupaged.batch import SMALLEST
from cupaged.scheduler import step
from cupaged.scheduler.pack import BatchBuffer, Packed
from tests.scheduler.groups import make_scheduler

numba: Any = _numba  # untyped


def test_what_becomes_words_has_the_types_that_are_read() -> None:
    scheduler, buffer = make_scheduler(), BatchBuffer(SMALLEST)
    packed = Packed(buffer.views(SMALLEST, 0).arrays, buffer.serials)

    assert numba.typeof(scheduler._state) == numba.typeof(step.example_state())
    assert numba.typeof(packed) == numba.typeof(step.example_packed())

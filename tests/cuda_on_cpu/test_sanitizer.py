"""Mode check finds integer arithmetic that C++ leaves undefined, where a GPU and a CPU may differ."""

from typing import Any

import pytest

from tests.cuda_on_cpu.planted import complaint, device, zeros

# kernel of integers.cu: a good argument, a bad one, what the message says
UNDEFINED = {
    "add": (5, 2**31 - 1, "+ of integers overflows"),
    "subtract": (5, -(2**31), "- of integers overflows"),
    "multiply": (5, 2**16, "* of integers overflows"),
    "negate": (5, -(2**31), "negation of an integer overflows"),
    "divide": (5, 0, "integer division by zero"),
    "remainder_of": (5, 0, "integer division by zero"),
    "shift": (5, 32, "shift by a negative number or by more than there are bits"),
    "to_int": (5.5, 3e9, "a float becomes an integer that cannot hold it"),
    "take": (3, 4, "index out of an array's bounds"),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_undefined_arithmetic_is_found(name: str) -> None:
    good, bad, what = UNDEFINED[name]
    kernel = device().kernel("integers", name)
    out: Any = zeros(1)

    kernel((1, 1, 1), 1, (out, good))
    message = complaint(kernel, (1, 1, 1), 1, (out, bad))

    assert what in message
    assert "integers.cu:" in message

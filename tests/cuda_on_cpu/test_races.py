"""Mode check finds accesses that no barrier puts in order, and reads of what nobody wrote."""

import pytest

from tests.cuda_on_cpu.planted import complaint, device, line, zeros

SHARED_BYTES = 256
# kernel: how many blocks it takes, what the message says of its array
RACES = {
    "read_before_barrier": (1, "of 's'"),
    "write_before_barrier": (1, "of 's'"),
    "in_dynamic_shared": (1, "of 'dynamic shared memory'"),
    "within_warp": (1, "of 's'"),
    "across_warps": (1, "of 's'"),
    "one_of_many_readers": (1, "bytes 0 to 3 of 's'"),
    "in_a_chain": (1, "bytes 0 to 3 of 's'"),
    "between_blocks": (2, "of 'out'"),
    "neighbouring_blocks": (2, "bytes 252 to 255 of 'out'"),
    "atomics": (1, "bytes 0 to 3 of 'out'"),
}
UNWRITTEN = {
    "uninitialised": (1, "bytes 160 to 163 of 's'"),
    "of_block_before": (2, "bytes 0 to 3 of 's'"),
}


@pytest.mark.parametrize("name", RACES)
def test_race_is_found_and_both_lines_named(name: str) -> None:
    blocks, array = RACES[name]
    kernel = device().kernel("races", name, BUG=1)

    message = complaint(kernel, (blocks, 1, 1), 64, (zeros(128),), SHARED_BYTES)

    assert "race: " in message
    assert array in message
    other = "" if name == "between_blocks" else "other of "
    assert line("races", name) in message
    assert line("races", other + name) in message


@pytest.mark.parametrize("schedule", ["reverse", "random"])
@pytest.mark.parametrize("name", RACES)
def test_race_is_found_whichever_thread_comes_first(name: str, schedule: str) -> None:
    blocks, array = RACES[name]
    kernel = device(schedule=schedule).kernel("races", name, BUG=1)

    message = complaint(kernel, (blocks, 1, 1), 64, (zeros(128),), SHARED_BYTES)

    assert array.split()[-1] in message
    assert line("races", name) in message or line("races", f"other of {name}") in message


@pytest.mark.parametrize("name", UNWRITTEN)
def test_read_of_shared_memory_that_was_not_written_is_found(name: str) -> None:
    blocks, array = UNWRITTEN[name]
    kernel = device().kernel("races", name, BUG=1)

    message = complaint(kernel, (blocks, 1, 1), 64, (zeros(128),))

    assert message.startswith(f"{line('races', name)}: reads {array}")


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
@pytest.mark.parametrize(("name", "blocks"), {n: b for n, (b, _) in (RACES | UNWRITTEN).items()}.items())
def test_right_twin_runs(name: str, blocks: int, schedule: str) -> None:
    kernel = device(schedule=schedule).kernel("races", name, BUG=0)

    kernel((blocks, 1, 1), 64, (zeros(128),), SHARED_BYTES)


def test_race_with_one_of_many_readers_is_found_in_any_order_of_them() -> None:
    for seed in range(50):
        kernel = device(schedule="random", seed=seed).kernel("races", "one_of_many_readers", BUG=1)

        assert "of 's'" in complaint(kernel, (1, 1, 1), 64, (zeros(64),))


def test_message_names_who_and_where() -> None:
    kernel = device().kernel("races", "read_before_barrier", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(64),))

    assert message == (
        f"{line('races', 'read_before_barrier')}: race: writes bytes 0 to 3 of 's', which thread 63 "
        f"(warp 1, lane 31) read at {line('races', 'other of read_before_barrier')} with no barrier between"
        "\n  in read_before_barrier, block (0, 0, 0), thread 0 (warp 0, lane 0)"
    )


def test_message_names_the_other_block() -> None:
    kernel = device().kernel("races", "between_blocks", BUG=1)

    message = complaint(kernel, (2, 1, 1), 64, (zeros(64),))

    assert "which block (0, 0, 0), thread 0 (warp 0, lane 0) wrote at " in message
    assert "blocks are in no order" in message


def test_fast_mode_gives_each_block_shared_memory_full_of_nan() -> None:
    out = zeros(128)

    device("fast").kernel("races", "of_block_before", BUG=1)((2, 1, 1), 64, (out,))

    assert out.tolist() == [5] * 64 + [-1] * 64


def test_fast_mode_gives_racy_kernels_other_bits_under_other_schedules() -> None:
    results = set()
    for schedule in ("forward", "reverse", "random"):
        out = zeros(64)
        device("fast", schedule=schedule).kernel("races", "read_before_barrier", BUG=1)((1, 1, 1), 64, (out,))
        results.add(out.tobytes())

    assert len(results) == 3

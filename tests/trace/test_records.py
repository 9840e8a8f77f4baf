"""The file holds every record that was written, whatever ended it, and says what is wrong with it."""

import errno
import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cupaged.trace.records import MAGIC, Kind, TraceFile, read_records
from cupaged.trace.varint import decode_ints, encode_ints

PAYLOADS = [b"{}", b"", bytes(range(256)), b"\n" * 3]


def write(path: Path) -> bytes:
    trace = TraceFile(path, with_text=False)
    for kind, payload in zip((Kind.SCHEDULER, Kind.PLAN, Kind.UPDATE, Kind.IDLE), PAYLOADS, strict=True):
        trace.write(kind, payload)
    trace.close()
    return path.read_bytes()


def test_records_come_back_in_order(tmp_path: Path) -> None:
    data = write(tmp_path / "a.trace")

    recording = read_records(tmp_path / "a.trace")

    assert [record.payload for record in recording.records] == PAYLOADS
    assert recording.num_lost_bytes == 0
    assert data.startswith(MAGIC)


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "a.trace", with_text=False)

    trace.write(Kind.SCHEDULER, b"{}")

    assert len(read_records(tmp_path / "a.trace").records) == 1
    assert (tmp_path / "a.trace").stat().st_size == trace.num_bytes
    trace.close()


def test_a_file_that_ends_anywhere_is_read_to_its_last_whole_record(tmp_path: Path) -> None:
    data = write(tmp_path / "a.trace")
    first = len(MAGIC) + 9 + len(PAYLOADS[0])  # behind the first record
    sizes = []

    for end in range(len(MAGIC), len(data)):
        (tmp_path / "b.trace").write_bytes(data[:end])
        if end < first:
            with pytest.raises(ValueError, match="ended before it began"):
                read_records(tmp_path / "b.trace")
            continue
        recording = read_records(tmp_path / "b.trace")
        assert [record.payload for record in recording.records] == PAYLOADS[: len(recording.records)]
        assert recording.num_lost_bytes < len(data) - len(MAGIC)
        sizes.append(len(recording.records))

    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2, 3}


def test_damage_is_found_and_the_error_says_how_much_is_whole(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.trace"))
    data[-20] ^= 1  # in the third record

    (tmp_path / "a.trace").write_bytes(data)
    with pytest.raises(ValueError, match=r"record 2, at byte \d+ of \d+, is damaged.*head -c (\d+)") as info:
        read_records(tmp_path / "a.trace")

    whole = int(str(info.value).rsplit(" ", 1)[1])
    (tmp_path / "a.trace").write_bytes(data[:whole])
    assert len(read_records(tmp_path / "a.trace").records) == 2


def spans(path: Path) -> list[bytes]:
    """Return the file's line and its records, each as it stands there."""
    write(path)
    ends = np.cumsum([len(MAGIC), *(9 + len(payload) for payload in PAYLOADS)])
    return [path.read_bytes()[begin:end] for begin, end in pairwise([0, *ends])]


@pytest.mark.parametrize("order", [[0, 1, 3, 2, 4], [0, 1, 2, 2, 3, 4], [0, 1, 2, 4]])
def test_whole_records_that_are_moved_doubled_or_left_out_are_damage(
    tmp_path: Path, order: list[int]
) -> None:
    parts = spans(tmp_path / "a.trace")
    (tmp_path / "a.trace").write_bytes(b"".join(parts[i] for i in order))

    with pytest.raises(ValueError, match="is damaged or not in its place"):
        read_records(tmp_path / "a.trace")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.trace").write_text("hello")

    with pytest.raises(ValueError, match=r"is no trace of this version: it begins b'hello'.*that wrote it"):
        read_records(tmp_path / "a.trace")


def test_a_file_that_was_made_and_never_written_says_so(tmp_path: Path) -> None:
    TraceFile(tmp_path / "a.trace", with_text=False)

    with pytest.raises(ValueError, match="its run ended before it began"):
        read_records(tmp_path / "a.trace")


def test_a_trace_that_is_there_is_not_overwritten_but_an_empty_one_is_used(tmp_path: Path) -> None:
    TraceFile(tmp_path / "a.trace", with_text=False)  # a load that failed
    write(tmp_path / "a.trace")

    with pytest.raises(ValueError, match="exists already"):
        TraceFile(tmp_path / "a.trace", with_text=False)


def test_a_path_that_cannot_be_written_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        TraceFile(tmp_path / "none" / "a.trace", with_text=False)
    for directory in (tmp_path, ""):
        with pytest.raises(ValueError, match=r"the trace '.*' is a directory"):
            TraceFile(directory, with_text=False)


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        closed = False

        def write(self, _data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.closed = True

    trace, full = TraceFile(tmp_path / "a.trace", with_text=False), Full()
    monkeypatch.setattr(trace, "_file", full)

    with caplog.at_level(logging.WARNING):
        trace.write(Kind.SCHEDULER, b"{}")
        trace.write(Kind.PLAN, b"")

    assert len(caplog.records) == 1
    assert "a.trace ends here: [Errno 28] No space left on device" in caplog.text
    assert full.closed


@pytest.mark.parametrize("value", [0, 1, -1, 63, -64, 64, 2**31, -(2**31), 2**63 - 1, -(2**63)])
def test_numbers_come_back(value: int) -> None:
    assert decode_ints(encode_ints([value, 5, value])) == [value, 5, value]


def test_small_numbers_take_a_byte_and_a_cut_one_is_refused() -> None:
    assert len(encode_ints([0, 63, -64])) == 3
    with pytest.raises(ValueError, match="cut off"):
        decode_ints(encode_ints([64])[:1])

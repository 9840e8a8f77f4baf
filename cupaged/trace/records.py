"""The file: a line that names the format, then records, each with its length and a checksum of all so far.

A record goes to the operating system as it is written, so a process that dies loses none; a reader takes
every whole record of a file that ends within one.
"""

import io
import logging
import struct
import zlib
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.trace.varint import decode_ints

logger = logging.getLogger(__name__)

MAGIC = b"cupaged trace 2\n"
_HEAD = struct.Struct("<IB")  # bytes of payload, kind
_CHECKSUM = struct.Struct("<I")  # CRC-32 of heads and payloads from the first record to this one


class Kind(IntEnum):
    """What a record tells, mostly as numbers (varint.py); times are microseconds since the record before."""

    SCHEDULER = 1  # a new scheduler, without groups: JSON
    ADD = 2
    PLAN = 3  # a step that was planned
    IDLE = 4  # schedule() that found nothing to run
    UPDATE = 5  # the oldest step came back
    FINISH = 6  # one sequence, from outside the scheduler
    FINISH_GROUP = 7
    CONTINUE_BEAMS = 8
    RESET_PREFIX_CACHE = 9


_KINDS = frozenset(Kind)

# What an ADD record leaves out where it is so; the rest is required.
REQUEST_DEFAULTS: dict[str, Any] = {
    "num_sequences": 1,
    "is_beam": False,
    "num_candidates": 0,
    "priority": 0,
    "salts": [],
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "min_tokens": 0,
    "num_banned": 0,
    "stop_token_ids": [],
}


class Record(NamedTuple):
    """One record as it stands in the file."""

    kind: Kind
    payload: bytes

    @property
    def values(self) -> list[int]:
        """Return the numbers of the payload."""
        return decode_ints(self.payload)


class TraceFile:
    """The file that a run writes; it outlives schedulers, and a disk that is full ends it, not the run."""

    def __init__(self, path: str | Path, *, with_text: bool) -> None:
        """Make the file; ValueError if there is a trace already, OSError if it cannot be made."""
        self.path = Path(path)
        self.with_text = with_text
        self.num_bytes = 0
        self._checksum = 0
        if self.path.is_dir():
            raise ValueError(f"the trace {str(path)!r} is a directory; name a file")
        if self.path.exists() and self.path.stat().st_size > 0:
            raise ValueError(f"the trace {path} exists already; move it away or name another file")
        self.path.touch()
        self._file: io.FileIO | None = None  # opened by the first record: a load may fail
        self._has_ended = False

    def write(self, kind: Kind, payload: bytes) -> None:
        """Append one record."""
        if self._has_ended:
            return
        head = _HEAD.pack(len(payload), kind)
        self._checksum = zlib.crc32(payload, zlib.crc32(head, self._checksum))
        data = head + payload + _CHECKSUM.pack(self._checksum)
        try:
            if self._file is None:
                self._file = io.FileIO(self.path, "w")  # unbuffered: what is written survives the process
                data = MAGIC + data
            if self._file.write(data) != len(data):
                raise OSError("only part of a record could be written")
            self.num_bytes += len(data)
        except OSError as error:
            logger.warning("The trace %s ends here: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """End the file; nothing is written after it."""
        self._has_ended = True
        if self._file is not None:
            self._file.close()


class Recording(NamedTuple):
    """What a trace file holds."""

    records: list[Record]
    num_lost_bytes: int  # behind the last whole record: the process or the disk ended within one


def read_records(path: str | Path) -> Recording:
    """Read all whole records; ValueError says what is wrong with the file and where."""
    data = Path(path).read_bytes()
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ValueError(
            f"{path} is no trace of this version: it begins {data[: len(MAGIC)]!r}, not {MAGIC!r}; read it "
            "with the version that wrote it"
        )
    records: list[Record] = []
    at, checksum = len(MAGIC), 0
    while at + _HEAD.size <= len(data):
        size, kind = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        if end + _CHECKSUM.size > len(data):
            break
        checksum = zlib.crc32(data[at:end], checksum)
        if _CHECKSUM.unpack_from(data, end) != (checksum,) or kind not in _KINDS:
            raise ValueError(
                f"{path}: record {len(records)}, at byte {at} of {len(data)}, is damaged or not in "
                f"its place; what is before it is a whole trace: head -c {at}"
            )
        records.append(Record(Kind(kind), data[at + _HEAD.size : end]))
        at = end + _CHECKSUM.size
    if not records or records[0].kind != Kind.SCHEDULER:
        raise ValueError(f"{path} holds no scheduler's configuration; its run ended before it began")
    return Recording(records, len(data) - at)

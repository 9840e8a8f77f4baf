"""The page of a trace: one HTML file with its data in it, that asks nothing of a network."""

import base64
import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cupaged.trace.pool_history import SERIES, PoolHistory, read_history
from cupaged.trace.workload import Segment

_FOLDER = Path(__file__).parent
_PARTS = ("page.css", "page_history.js", "page_charts.js", "page.js")  # of page.html


def page_data(segment: Segment, history: PoolHistory, name: str) -> dict[str, Any]:
    """Return what the page's script reads: plain values, and arrays packed into one text."""
    arrays = {
        field: array.astype("<u4" if array.dtype.kind == "u" else "<f4")
        for field, array in history._asdict().items()
    }
    packed = zlib.compress(b"".join(array.tobytes() for array in arrays.values()), 9)
    described = ("max_total_tokens", "num_sequences", "is_beam", "priority")
    requests = [
        [round(request.time, 6), request.prompt.size, *(int(request.fields[name]) for name in described)]
        for request in segment.requests.values()
    ]
    return {
        "name": name,
        "config": asdict(segment.config),
        "series": SERIES,
        "requests": requests,  # by arrival: seconds, prompt tokens, then `described`
        "arrays": [[field, array.size, array.dtype.kind] for field, array in arrays.items()],
        "packed": base64.b64encode(packed).decode(),  # deflate, 4 bytes a number, little endian
    }


def write_page(segment: Segment, path: Path, *, name: str) -> int:
    """Write the page and return its bytes; PlansDifferError or ValueError if the trace cannot be shown."""
    data = json.dumps(page_data(segment, read_history(segment), name), separators=(",", ":"))
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    for part_name in _PARTS:
        part = (_FOLDER / part_name).read_text(encoding="utf-8")
        page = page.replace(f"/* {part_name} */", part)
    # A "<" in the data could end the script that they stand in.
    page = page.replace("/* data */", data.replace("<", "\\u003c"))
    return path.write_bytes(page.encode())

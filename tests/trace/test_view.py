"""The page of a trace: its data are the pools as the replay had them, and a browser shows them."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from colorsys import hls_to_rgb
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from cupaged.scheduler.block_manager import evictable
from cupaged.scheduler.counters import Counter
from cupaged.trace.pool_history import (
    CACHED,
    COPIED,
    EVICTED,
    HIT,
    SERIES,
    SWAPPED_IN,
    SWAPPED_OUT,
    USED,
    read_history,
)
from cupaged.trace.recorder import TraceRecorder
from cupaged.trace.records import Kind, TraceFile, read_records
from cupaged.trace.replay import replay
from cupaged.trace.view import write_page
from cupaged.trace.workload import Segment, read_segments
from tests.scheduler.groups import make_group
from tests.trace.runs import Run, record, small_config

NAME = "run </script> & co"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    """A run with every event: prefixes found, copies, swaps, evictions."""
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    record(path, small_config(num_blocks=14, preemption_mode="swap", num_batches=2), seed=1, number=40)
    return read_segments(read_records(path))[0]


@pytest.fixture(scope="module")
def page(segment: Segment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "map.html"
    write_page(segment, path, name=NAME)
    return path


def data_of(page: Path) -> dict[str, Any]:
    """Return the page's data, its arrays unpacked."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    packed, offset = zlib.decompress(base64.b64decode(data["packed"])), 0
    for name, size, kind in data["arrays"]:
        data[name] = np.frombuffer(packed, f"<{kind}4", size, offset)
        offset += 4 * size
    assert offset == len(packed)
    return data


def words_by_frame(data: dict[str, Any]) -> list[NDArray[np.uint32]]:
    config, start = data["config"], data["change_start"]
    words = np.zeros(config["num_blocks"] + config["num_host_blocks"], np.uint32)
    frames = []
    for frame in range(len(data["steps"])):
        changed = slice(start[frame], start[frame + 1])
        words[data["change_block"][changed]] = data["change_word"][changed]
        frames.append(words.copy())
    return frames


def test_frames_are_the_pools_after_each_plan(segment: Segment, page: Path) -> None:
    frames = iter(words_by_frame(data_of(page)))

    for event in replay(segment):
        if event.kind != Kind.PLAN:
            continue
        words = next(frames)
        manager = event.scheduler.block_manager
        references = np.concatenate(
            [pool.at.ref_count[:-1] for pool in (manager.blocks, manager.host_blocks)]
        )
        is_cached = np.isin(np.arange(references.size), evictable(manager.blocks))
        assert np.array_equal(words & 1023, references)
        assert np.array_equal((words >> 10 & 3) == USED, references > 0)
        assert np.array_equal((words >> 10 & 3) == CACHED, is_cached)
        assert event.batch is not None
        for i, seq in enumerate(event.sequences):
            table = event.batch.block_tables[i]
            own = table[table >= 0]
            shared = references[own] > 1
            assert (words[own[~shared]] >> 12 == seq.group.arrival).all()
    assert next(frames, None) is None


def test_events_are_the_batches_moves_and_what_the_scheduler_counted(segment: Segment) -> None:
    history = read_history(segment)
    counted = np.bincount(history.events >> 28, minlength=5)
    *_, last = replay(segment)

    assert counted[EVICTED] == last.scheduler.counters[Counter.EVICTED_BLOCKS] > 0
    assert counted[HIT] > 0
    assert counted[COPIED] > 0
    assert counted[SWAPPED_IN] > 0
    assert (
        counted[SWAPPED_OUT] == 2 * last.scheduler.counters[Counter.SWAPPED_OUT_BLOCKS] > 0
    )  # on the device and on the host
    assert len(history.steps) == len(segment.steps)


def test_a_block_of_which_a_part_is_found_is_a_hit(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "a.trace", with_text=False)
    run = Run(TraceRecorder(small_config(), None, trace), seed=0, ends_every=1000)
    for _ in range(2):  # the second finds 7 of 8 tokens, in 2 blocks of 4: the last is always computed
        run.add(make_group(8, 2))
        while run.scheduler.has_unfinished():
            run.step()
    trace.close()
    (segment,) = read_segments(read_records(trace.path))

    history = read_history(segment)

    assert np.count_nonzero(history.events >> 28 == HIT) == 2


def test_a_long_run_is_shown_in_fewer_frames_and_ends_the_same(segment: Segment) -> None:
    whole, thinned = read_history(segment), read_history(segment, max_frames=10)

    assert 5 <= len(thinned.steps) <= 10
    assert thinned.steps[-1] == whole.steps[-1]
    assert np.array_equal(thinned.series[:, -1], whole.series[:, -1])
    assert sorted(thinned.events.tolist()) == sorted(whole.events.tolist())


def test_the_page_stands_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert not re.search(r"https?://|src=|href=|@import|url\(", text)
    assert "/* page" not in text
    assert text.count("</script>") == 2  # the name of the file has not ended one


# In a browser. What a person would do is done by a script at the end of the page, which writes what it sees
# into the page's text.
PROBE = """
<pre id="probe"></pre><script>
const until = (ready, then) => ready() ? then() : setTimeout(() => until(ready, then), 5);
const key = (key, shiftKey) => dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey}));
const seen = [];
const look = what => seen.push([what, document.body.dataset.frame, $("step").textContent, $("slider").value]);
until(() => document.body.dataset.ready || document.body.dataset.error, async () => {
  look("start");
  key("ArrowRight"); look("right");
  key("ArrowRight", true); look("shift right");
  key("ArrowLeft"); look("left");
  key("End"); look("end");
  key("Home"); look("home");
  key("e"); look("event");
  const facts = {};
  for (const term of document.querySelectorAll("#facts dt"))
    facts[term.textContent] = term.nextSibling.textContent;
  const box = $("device").getBoundingClientRect(), place = {clientX: box.left + 14, clientY: box.top + 14};
  $("device").dispatchEvent(new MouseEvent("mousemove", place));
  const tip = $("tip").hidden ? "" : $("tip").textContent;
  $("device").dispatchEvent(new MouseEvent("click", place));
  const chosen = document.querySelector("#owners .chosen span:nth-child(2)").textContent;
  const data = JSON.parse($("data").textContent), history = new History(data, await unpack(data.packed));
  const sumOf = words => words.reduce((sum, word, i) => sum + word * (i + 1), 0);
  const sums = Array.from(history.steps, (_, frame) => sumOf(history.wordsAt(frame)));
  const error = document.body.dataset.error || "", name = $("name").textContent;
  $("probe").textContent = JSON.stringify({seen, facts, tip, chosen, sums, error, name});
});
</script>
"""


def browse(*arguments: str, profile: Path) -> str:
    """Run headless Chromium, with all off that would look for a network."""
    assert CHROMIUM is not None
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"]
    command += [f"--disable-{what}" for what in quiet]
    command += [
        f"--user-data-dir={profile}",
        "--window-size=1200,800",
        "--virtual-time-budget=20000",
        *arguments,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_steps_and_follows_keys_and_mouse(page: Path, tmp_path: Path) -> None:
    text, probed = page.read_text(encoding="utf-8"), tmp_path / "probed.html"
    probed.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    data = data_of(page)
    frames_of_words = words_by_frame(data)

    dom = browse("--dump-dom", probed.as_uri() + "#3", profile=tmp_path / "profile")

    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    seen = json.loads(unescape(found[1]))
    assert seen["error"] == ""
    assert seen["name"] == NAME
    last, starts = len(data["steps"]) - 1, data["event_start"]
    event = next(frame for frame in range(1, last) if starts[frame + 1] > starts[frame])
    frames = {"start": 3, "right": 4, "shift right": 14, "left": 13, "end": last, "home": 0, "event": event}
    assert seen["seen"] == [[what, str(frame), str(frame), str(frame)] for what, frame in frames.items()]
    series = data["series"].reshape(len(SERIES), -1)
    assert seen["facts"]["sequences running"] == str(int(series[SERIES.index("running"), event]))
    assert seen["facts"]["requests waiting"] == str(int(series[SERIES.index("waiting"), event]))
    weights = np.arange(1, frames_of_words[0].size + 1)
    assert seen["sums"] == [int((words * weights).sum()) for words in frames_of_words]
    word = int(frames_of_words[event][0])
    assert word >> 10 & 3 == USED, "block 0 is to be held by somebody"
    assert seen["tip"].startswith("block 0\nheld by ")
    assert f"\nrequest {word >> 12}" in seen["tip"]
    assert seen["chosen"] == f"request {word >> 12}"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_paints_each_block_in_the_color_of_who_holds_it(page: Path, tmp_path: Path) -> None:
    data = data_of(page)
    frame = len(data["steps"]) // 2
    picture = tmp_path / "shot.png"

    browse(f"--screenshot={picture}", f"{page.as_uri()}#{frame}", profile=tmp_path / "profile")

    pixels = np.rint(255 * imread(picture)[:, :, :3]).astype(np.uint8).reshape(-1, 3)
    shown = set(map(tuple, np.unique(pixels, axis=0).tolist()))
    words = words_by_frame(data)[frame].tolist()
    owners = {word >> 12 for word in words if word >> 10 & 3 == USED}
    assert len(owners) > 1
    for owner in owners:
        assert any(max(map(abs, np.subtract(color_of(owner), color))) <= 2 for color in shown), owner


def color_of(owner: int) -> tuple[int, int, int]:
    """Return what page.js calls hsl(owner * 137.508 62% 52%), the color of a light page."""
    red, green, blue = hls_to_rgb(owner * 137.508 % 360 / 360, 0.52, 0.62)
    return round(255 * red), round(255 * green), round(255 * blue)

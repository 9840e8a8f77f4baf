"""The fastest of several works, and choices kept on disk."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cupaged.backend.gemm_choices import Choice, ChoiceFile, fastest

ROOT = Path(__file__).parents[2]
KEY = {"gpu": "a GPU", "out_features": 24, "has_bias": False}
CHOICES = {1: Choice(b"\x00\xff" * 32, 1.0), 24: Choice(bytes(64), 1.25)}


class Clock:
    """A device whose graphs take the times that a test gives, one after the other."""

    def __init__(self, times: Sequence[Sequence[float]]) -> None:
        self._times = [iter(each) for each in times]
        self.order: list[int] = []

    def capture(self, work: Callable[[], Any]) -> Any:
        """Return a graph of a work that returns its index."""
        index = work()

        class Graph:
            def launch(_) -> None:  # noqa: N805
                self.order.append(index)

        return Graph()

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the next time of the graph that is launched."""
        work()
        return next(self._times[self.order[-1]])


def measure(*times: Sequence[float]) -> tuple[tuple[int, float], list[int]]:
    """Return what is fastest, and in which order the works took turns."""
    clock: Any = Clock(times)
    works = [lambda index=index: index for index in range(len(times))]
    return fastest(clock, works), clock.order


def test_best_time_counts_and_works_take_turns() -> None:
    found, order = measure([9, 6, 6, 6], [3, 4, 9, 4], [5, 5, 4, 5])

    assert found == (1, 2.0)
    assert order == [0, 1, 2] * 4


def test_first_stays_unless_another_is_clearly_faster() -> None:
    assert measure([1.0] * 4, [0.99] * 4)[0] == (0, 1.0)
    assert measure([1.0] * 4, [0.9] * 4)[0] == (1, 1.0 / 0.9)


def test_a_single_work_is_not_timed() -> None:
    assert measure([]) == ((0, 1.0), [])


def test_choices_come_back_as_they_were(tmp_path: Path) -> None:
    ChoiceFile(tmp_path / "new", KEY).store(CHOICES)

    assert ChoiceFile(tmp_path / "new", dict(reversed(KEY.items()))).load() == CHOICES
    assert ChoiceFile(tmp_path / "new", {**KEY, "gpu": "another GPU"}).load() == {}
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_choices_for_other_rows_stay(tmp_path: Path) -> None:
    one, two = ChoiceFile(tmp_path, KEY), ChoiceFile(tmp_path, KEY)
    newer = Choice(bytes(range(64)), 1.5)

    one.store(CHOICES)
    two.store({24: newer, 32: newer})

    assert one.load() == {**CHOICES, 24: newer, 32: newer}


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("00ff", "00fe"),
        lambda text: text.replace("a GPU", "b GPU"),
        lambda _: "[]",
        lambda _: "7",
        lambda _: 10_000 * "[",
        lambda text: json.dumps({**json.loads(text), "choices": None}),
        lambda text: json.dumps({**json.loads(text), "sha256": None}),
        lambda _: "\udcff",
    ],
)
def test_damaged_file_holds_nothing_and_is_replaced(tmp_path: Path, damage: Callable[[str], str]) -> None:
    file = ChoiceFile(tmp_path, KEY)
    file.store(CHOICES)
    (path,) = tmp_path.iterdir()
    path.write_text(damage(path.read_text()), encoding="utf-8", errors="surrogateescape")

    assert file.load() == {}
    file.store(CHOICES)
    assert file.load() == CHOICES


def test_processes_may_store_at_once(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom cupaged.backend.gemm_choices import Choice, ChoiceFile\n"
        f"file = ChoiceFile(Path({str(tmp_path)!r}), {KEY!r})\n"
        "for i in range(200):\n"
        "    file.store({int(sys.argv[1]): Choice(bytes(64), 1.0 + i)})\n"
        "    assert file.load(), 'a file that is not whole'\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, rows], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rows in ("1", "2")
    ]

    assert [process.communicate()[1] for process in processes] == ["", ""]
    (path,) = tmp_path.iterdir()
    assert ChoiceFile(tmp_path, KEY).load().keys() <= {1, 2}
    assert path.suffix == ".json"


def test_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file")

    with caplog.at_level(logging.WARNING, "cupaged"):
        ChoiceFile(tmp_path / "taken", KEY).store(CHOICES)

    assert "cannot be kept, and so is made at each start: " in caplog.text

from pathlib import Path

import pytest

from tools.mutate_block_manager import TESTS, copy_repository, first_failure, main, plant
from tools.scheduler_faults import FAULTS, Fault

SCHEDULER = Path(__file__).parents[2] / "cupaged" / "scheduler"
TESTED = Path(__file__).parents[1] / "scheduler"


def test_every_fault_changes_what_is_there_once() -> None:
    for fault in FAULTS:
        text = (SCHEDULER / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.before) == 1, f"{fault.file}: {fault.what}"
        assert fault.before != fault.after
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) >= 20


def test_planted_fault_is_noticed_by_name(tmp_path: Path) -> None:
    copy_repository(tmp_path)

    plant(FAULTS[0], tmp_path)

    assert first_failure(tmp_path).startswith("test_allocator.py::")


def test_each_file_with_a_fault_has_its_own_tests_run() -> None:
    own = {fault.file.removesuffix(".py") for fault in FAULTS}
    own = {name for name in own if (TESTED / f"test_{name}.py").is_file()}

    assert "group_queue" in own
    assert own <= set(TESTS)


def test_words_that_no_fault_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutate_block_manager", "--only", "nowhere.py"])

    with pytest.raises(SystemExit):
        main()

    assert "no fault has 'nowhere.py'" in capsys.readouterr().err


def test_fault_that_no_longer_applies_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cupaged/scheduler").mkdir(parents=True)
    (tmp_path / "cupaged/scheduler/plan.py").write_text("a = 1\n", encoding="utf-8")

    with pytest.raises(ValueError, match=r"plan.py has 'b = 2' 0 times, not once"):
        plant(Fault("plan.py", "another b", "b = 2", "b = 3"), tmp_path)

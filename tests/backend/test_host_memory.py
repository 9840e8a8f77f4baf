"""The memory that a process may still take."""

from pathlib import Path

import pytest

from cupaged.backend.host_memory import UNKNOWN, available_memory

MEMINFO = "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  80 kB\n"


def write(root: Path, **files: str) -> Path:
    """Write files; in their names __ stands for / and _dot_ for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_machine_tells_what_is_available(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, proc__meminfo=MEMINFO)) == 80 * 1024


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory_dot_max", "memory_dot_current"),
        ("memory__memory_dot_limit_in_bytes", "memory__memory_dot_usage_in_bytes"),
    ],
)
def test_limit_of_a_container_counts_if_it_is_less(tmp_path: Path, limit: str, used: str) -> None:
    write(tmp_path, proc__meminfo=MEMINFO)

    write(tmp_path, **{f"sys__fs__cgroup__{limit}": "50000\n", f"sys__fs__cgroup__{used}": "20000\n"})

    assert available_memory(tmp_path) == 30000


def test_file_cache_in_a_container_can_be_taken(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, sys__fs__cgroup__memory_dot_max="50000\n")

    write(tmp_path, sys__fs__cgroup__memory_dot_current="45000\n")
    write(tmp_path, sys__fs__cgroup__memory_dot_stat="anon 5\nactive_file 3000\ninactive_file 7000\n")

    assert available_memory(tmp_path) == 15000


def test_container_without_a_limit_has_the_machines_memory(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, sys__fs__cgroup__memory_dot_max="max\n")

    write(tmp_path, sys__fs__cgroup__memory_dot_current="20000\n")

    assert available_memory(tmp_path) == 80 * 1024


def test_silent_system_has_a_plausible_size(tmp_path: Path) -> None:
    assert available_memory(tmp_path) >= min(UNKNOWN, 1 << 30)

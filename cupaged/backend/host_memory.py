"""How much memory this process may still take: the machine's, or its container's if that is less."""

import os
from pathlib import Path

UNKNOWN = 4 << 30  # bytes, where the system tells nothing: what any machine for this work has


def available_memory(root: Path = Path("/")) -> int:
    """Return bytes; `root` is where proc and sys are looked up."""
    found = [value for value in (_machine(root), _container(root)) if value is not None]
    return max(0, min(found)) if found else UNKNOWN


def _machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):  # macOS: all there is, for want of better
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container(root: Path) -> int | None:
    """Return what the control group (version 2, then 1) leaves, or None where it sets no limit."""
    for folder, limit_name, used_name in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _lines(folder / limit_name), _lines(folder / used_name)
        if limit and used and limit[0] != "max":
            # File cache gives way; what a model was just read from may count as active.
            cached = sum(
                int(line.split()[1])
                for line in _lines(folder / "memory.stat")
                if line.startswith(("active_file ", "inactive_file "))
            )
            return int(limit[0]) - int(used[0]) + cached
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []

"""Where cupaged keeps what can be made again: compiled kernels and converted models."""

import os
import sys
from pathlib import Path


def user_cache_dir() -> Path:
    """Return our folder in the user's cache folder, by the platform's convention."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cupaged"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "cupaged"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupaged"

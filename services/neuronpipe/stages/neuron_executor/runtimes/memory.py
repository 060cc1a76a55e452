"""The memory that this process may use."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# Version 1 writes a number of pages in place of "no limit".
_NO_LIMIT = 1 << 60


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """The container's limit in bytes, of control groups version 2 or 1; None without one."""
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            limit = file.read_text().strip()
        except OSError:
            continue
        return int(limit) if limit.isdigit() and int(limit) < _NO_LIMIT else None
    return None

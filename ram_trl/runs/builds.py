"""
Locks of DeepSpeed's builds that nobody holds any more.

DeepSpeed compiles what it needs at first use, one process at a time, under a lock that is a file. A process that is
killed meanwhile leaves the file, and all later ones wait for it without a word.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def abandoned_locks() -> list[Path]:
    """This user's locks of torch's extensions that no process of this machine has open; who builds has it open."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    found = []
    for path in sorted(Path(cache).glob("**/lock")):
        with suppress(OSError):
            found += [path.resolve()] if path.stat().st_uid == os.getuid() else []
    held = _open_files() if found else set()
    return [path for path in found if str(path) not in held]


def _open_files() -> set[str]:
    """Files that processes of this user have open."""
    found = set()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # it is another user's, or gone
            for descriptor in os.scandir(descriptors):
                with suppress(OSError):
                    found.add(os.readlink(descriptor.path))
    return found

"""Files that are there whole or not at all.

Knows files; must not know what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write; it takes its place at the end, and goes if anything is raised before.

    Whoever reads `path` meanwhile finds the old one. Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

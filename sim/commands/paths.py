"""Paths as they are typed.

Knows that an empty text is no path, although `Path` takes it for the working directory: an unset variable in a script
would else write there.
"""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["given_path"]


def given_path(text: str | Path) -> Path:
    """The path. Raises typer.BadParameter if it is empty; the working directory is `.`."""
    if isinstance(text, str) and not text.strip():
        raise typer.BadParameter("is empty; allowed: a path, such as . for the working directory")
    return Path(text)

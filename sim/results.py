"""The folder of a run: `results/<name>/<id>/`, its manifest and summary, and reading its tables back.

Knows files; must not know how a run is made. A folder is readable at every moment: the manifest says `complete: false`
from the start and is replaced at the end, and JSON files are replaced whole or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sim.whole_files import written_whole

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

SCHEMA_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SUMMARY: Final = "summary.json"
PICTURE: Final = "overview.png"
COMPARISON: Final = "comparison.json"
"""What `sim.against` writes instead of a manifest."""

Table = Literal["requests", "steps"]

_ID_DIGITS: Final = 10
_CODE_DIGITS: Final = 12
_COMPUTES: Final = ("sim/**/*.py", "workloads/**/*.py", "scenarios/calibrations/*.yaml")
_CHUNK_ROWS: Final = 65_536


class ResultsError(Exception):
    """A folder of results that cannot be made, written or read. The message names it and says why."""


def run_folder(root: Path, name: str, digest: str, seed: int) -> Path:
    """Where a run belongs. `digest`: hexadecimal, of the whole scenario as resolved, its seed included."""
    return root / name / f"{digest[:_ID_DIGITS]}-seed{seed}"


def input_facts(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Path, bytes and time of change of files that a run reads, so that it can be told whether they are the same."""
    facts = []
    for file in files:
        status = file.stat()
        facts.append({"path": str(file), "bytes": status.st_size, "modified_ns": status.st_mtime_ns})
    return facts


@functools.cache
def code_digest() -> str:
    """Hexadecimal, of what computes a run's figures and may change while the version stays (`digest_of_code`).

    Read once a process (1.6 MB, some 8 ms), by what makes or repeats a run. Which core runs makes no difference: a
    compiled one whose sources have changed does not run. Raises ResultsError.
    """
    return digest_of_code(Path(__file__).resolve().parent.parent)


def digest_of_code(root: Path) -> str:
    """Of the sources of `sim` and `workloads` below `root` and of the calibrations beside them, with their names.

    Raises ResultsError if one of them cannot be read.
    """
    files = {path.relative_to(root).as_posix(): path for pattern in _COMPUTES for path in root.glob(pattern)}
    digest = hashlib.sha256()
    for name in sorted(files):
        if files[name].name.startswith("."):  # An editor's.
            continue
        try:
            content = files[name].read_bytes()
        except OSError as error:
            raise ResultsError(_cannot("read", files[name], error)) from error
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:_CODE_DIGITS]


def find_complete(
    folder: Path, digest: str, version: str, code: str, inputs: list[dict[str, Any]], *, checked: bool
) -> dict[str, Any] | None:
    """The manifest of an earlier run that can stand for this one, or None.

    That is a complete one of the same scenario, on input files that have not changed, by the same version of speckv
    and the same code (`code_digest`), and held to the laws if this one is to be (`checked`).
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        same = (
            manifest["complete"] is True
            and manifest["scenario_digest"] == digest
            and manifest["versions"]["speckv"] == version
            and manifest["code"] == code
            and manifest["schema_version"] == SCHEMA_VERSION
            and manifest["inputs"] == inputs
            and (manifest["checked"] or not checked)
            and (folder / SUMMARY).is_file()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if same else None


def prepare(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make the folder, write a manifest that says `complete: false`, and take out what else an earlier run left.

    In this order: broken off between, it leaves no manifest that calls a run complete of which a part is gone.

    Raises:
        ResultsError: something is in the way, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MANIFEST, manifest)
        _remove_files(folder)
    except OSError as error:
        raise ResultsError(_cannot("write", folder, error)) from error


def discard(folder: Path) -> None:
    """Take a run's files out again, and the folders that only held them."""
    try:
        _remove_files(folder)
        (folder / MANIFEST).unlink(missing_ok=True)  # Last: until then it tells of what is there.
        for empty in (folder, folder.parent, folder.parent.parent):
            empty.rmdir()
    except OSError:
        return  # Somebody else's files are in it, or it is not ours to change.


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole: whoever reads it finds the old one or the new one. Raises OSError."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run.

    Raises:
        ResultsError: it is not there, or is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ResultsError(f"cannot read {path}: not an object")
        return content
    except OSError as error:
        raise ResultsError(_cannot("read", path, error)) from error
    except ValueError as error:
        raise ResultsError(f"cannot read {path}: not JSON ({error})") from error


def runs_below(folder: Path) -> list[Path]:
    """Of a folder that is no run itself, the folders of runs in it, up to two levels down; of any other none."""
    if (folder / MANIFEST).exists():
        return []
    found = [file.parent for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}") for file in folder.glob(pattern)]
    return sorted(found)


def comparisons_below(folder: Path) -> list[Path]:
    """The folders that `speckv run --against` has written in this one, up to two levels down, or itself if it is one.

    A folder that is a run or a sweep holds none.
    """
    if (folder / MANIFEST).exists():
        return []
    patterns = (COMPARISON, f"*/{COMPARISON}", f"*/*/{COMPARISON}")
    return sorted(file.parent for pattern in patterns for file in folder.glob(pattern))


def refuse_comparison(folder: Path) -> None:
    """For what needs a run.

    Raises:
        ResultsError: the folder is that of a comparison; the message says what shows it.
    """
    if (folder / MANIFEST).exists() or not (folder / COMPARISON).is_file():
        return
    content = read_json(folder / COMPARISON)
    words = [word for change in content.get("changes", ()) for word in ("--against", str(change))]
    command = shlex.join(["speckv", "run", "SCENARIO", *words, "--seeds", str(len(content.get("seeds", ())))])
    raise ResultsError(
        f"{folder} is a comparison, and neither a run nor a sweep; {command} shows it, and {COMPARISON} and "
        "comparison.csv hold its figures"
    )


def table_file(folder: Path, table: Table) -> Path:
    """The file of a run's table, whichever its format.

    Raises:
        ResultsError: the run has no such table.
    """
    for suffix in ("parquet", "csv"):
        file = folder / f"{table}.{suffix}"
        if file.is_file():
            return file
    raise ResultsError(f"{folder} has no table of {table}: neither {table}.parquet nor {table}.csv")


def read_table(folder: Path, table: Table) -> pd.DataFrame:
    """A run's table as a data frame; whole numbers of requests are pandas' `Int64`, which may be missing.

    Raises:
        ResultsError: the run has no such table.
    """
    file = table_file(folder, table)
    import pandas as pd

    from sim.observers.metrics import REQUEST_COLUMNS

    if file.suffix == ".csv":
        kinds = {"int64": "Int64", "float64": "float64", "string": "str"}
        if table == "requests":
            return pd.read_csv(file, dtype={name: kinds[kind] for name, kind in REQUEST_COLUMNS})
        whole = "from_ns" not in pd.read_csv(file, nrows=0).columns  # the means of a window are not
        return pd.read_csv(file, dtype="int64" if whole else None)
    import pyarrow as pa
    import pyarrow.parquet as pq

    def missing_numbers(kind: pa.DataType) -> Any:
        return pd.Int64Dtype() if pa.types.is_int64(kind) else None

    frame = pq.read_table(file).to_pandas(types_mapper=missing_numbers if table == "requests" else None)
    assert isinstance(frame, pd.DataFrame)
    return frame


def step_chunks(folder: Path, columns: list[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Columns of the table of steps, some tens of thousands of rows at a time, in order.

    A table of windows is read the same way: `scheduled_ns` and `updated_ns` are then where a window begins and ends.
    `num_steps` is how many steps a row stands for, 1 where it is that of a step.

    Raises:
        ResultsError: the run has no table of steps.
    """
    file = table_file(folder, "steps")
    if file.suffix == ".csv":
        import pandas as pd

        names = _places(list(pd.read_csv(file, nrows=0).columns), columns)
        for frame in pd.read_csv(file, usecols=list(names.values()), chunksize=_CHUNK_ROWS):
            yield _as_asked(columns, {name: frame[place].to_numpy() for name, place in names.items()})
        return
    import numpy as np
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as source:
        names = _places(source.schema_arrow.names, columns)
        for batch in source.iter_batches(_CHUNK_ROWS, columns=list(names.values())):
            # Not `to_numpy`, which imports pandas.
            yield _as_asked(columns, {name: np.from_dlpack(batch.column(place)) for name, place in names.items()})


def _places(there: list[str], columns: list[str]) -> dict[str, str]:
    """Under which name each column that is asked for stands in the file; `num_steps` may not be there."""
    renamed = {"scheduled_ns": "from_ns", "updated_ns": "to_ns"} if "from_ns" in there else {}
    wanted = [name for name in columns if name != "num_steps" or name in there]
    return {name: renamed.get(name, name) for name in wanted}


def _as_asked(columns: list[str], found: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    import numpy as np

    length = len(next(iter(found.values())))
    return {name: found[name] if name in found else np.ones(length, dtype=np.int64) for name in columns}


def _remove_files(folder: Path) -> None:
    tables = [f"{table}.{suffix}" for table in ("requests", "steps") for suffix in ("parquet", "csv")]
    for name in (SUMMARY, *tables, PICTURE):
        (folder / name).unlink(missing_ok=True)


def _cannot(do: str, path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        in_the_way = next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None)
        if in_the_way is not None:
            return f"cannot {do} {path}: {in_the_way} is in the way, and is no folder"
    return f"cannot {do} {path}: {error.strerror or error}"

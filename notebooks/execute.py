"""Run the notebooks here and keep their outputs in them: python notebooks/execute.py [NAME ...]

Each runs in a kernel of its own and in an empty folder, within a time limit. What is kept has no times and no
paths of the machine.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
LIMIT_S = 90
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, folder: Path, limit_s: float = LIMIT_S) -> nbformat.NotebookNode:
    """The notebook at `path` with the outputs of a run in `folder`.

    Raises CellExecutionError where a cell fails, TimeoutError after `limit_s` seconds in all.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    asyncio.run(asyncio.wait_for(client.async_execute(), limit_s))
    notebook.metadata = nbformat.from_dict(_METADATA)
    return notebook


def main(names: list[str]) -> None:
    """Run those whose names begin with one of `names`, or all."""
    for path in sorted(HERE.glob("*.ipynb")):
        if names and not path.name.startswith(tuple(names)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder), limit_s=600), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

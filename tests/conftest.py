"""What all tests share: hypothesis profiles, and folders of data that may lie beside the repository.

Knows where things lie, nothing about what is tested.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from sim.compiled import CORE

REPOSITORY = Path(__file__).resolve().parent.parent

# No deadlines: a busy machine would fail a sound property. CI draws the same examples every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
PROFILE = "ci" if os.environ.get("CI") else "local"
settings.load_profile(PROFILE)


def pytest_report_header() -> str:
    """Say which profile drives the property tests, and which core is tested."""
    return f"speckv: hypothesis profile {PROFILE}, core {CORE}"


def pytest_configure() -> None:
    """End with a message where the core that was asked for cannot be had."""
    if CORE.error is not None:
        raise pytest.UsageError(CORE.error)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what changes the core's insides while it runs: compiled, they cannot be changed."""
    if CORE.name == "compiled" and item.get_closest_marker("plain_core") is not None:
        pytest.skip("changes the core while it runs, which only its sources let one do: SPECKV_CORE=plain")


def _folder_beside(name: str, variable: str) -> Path:
    """`../shared/<name>` beside the repository, or what the environment variable says; skip where there is neither."""
    said = os.environ.get(variable)
    if said:
        if not Path(said).is_dir():
            pytest.fail(f"{variable}={said!r}: no such folder; name one or unset it")
        return Path(said)
    folder = REPOSITORY.parent / "shared" / name
    if not folder.is_dir():
        pytest.skip(f"needs ../shared/{name} beside the repository, or {variable} set to such a folder")
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with measurements and traces that others published; read by tests, never committed."""
    return _folder_beside("data", "SPECKV_SHARED_DATA")


@pytest.fixture(scope="session")
def shared_conformance() -> Path:
    """Folder with the scripted cases and the recorded decisions of released vLLM versions on them."""
    return _folder_beside("conformance", "SPECKV_SHARED_CONFORMANCE")

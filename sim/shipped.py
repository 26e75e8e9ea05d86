"""Where the scenarios that come with speckv lie. Knows the folder, not what a scenario is; imports nothing of `sim`."""

from pathlib import Path


def shipped_scenarios() -> Path:
    """Return the folder with the scenarios that speckv brings along: `quickstart.yaml`, `sweeps/`, `calibrations/`.

    It lies beside the package `sim` in a checkout, an editable install and an installed wheel alike; why, stands in
    `docs/decisions.md`.

    Raises:
        FileNotFoundError: the folder is not there, because the installation is damaged or `sim` was copied alone.
    """
    folder = Path(__file__).parent.parent / "scenarios"
    if not folder.is_dir():
        raise FileNotFoundError(f"the scenarios that come with speckv are missing: no folder {folder}; reinstall it")
    return folder

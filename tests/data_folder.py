"""The folder of real data, of stored references among them."""

import os

from pathlib import Path

__all__ = ["data_folder"]

ROOT = Path(__file__).parents[1]


def data_folder():
    """Return the folder, or raise FileNotFoundError where there is none."""
    folder = Path(os.environ.get("PYMC_SGHMC_DATA", ROOT / "../shared/data"))
    if not (folder / "references").is_dir():
        raise FileNotFoundError(f"no data at {folder}: set PYMC_SGHMC_DATA to their folder")
    return folder

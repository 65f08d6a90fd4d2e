"""Links to the documentation of other projects, also where a build has no network."""

from pathlib import Path
from zlib import compress

__all__ = ["mapping"]

HEADER = (
    "# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    "# The remainder of this file is compressed using zlib.\n"
)


def mapping(listing: Path, folder: Path, online: bool) -> dict:
    """Return Sphinx's ``intersphinx_mapping``.

    Parameters
    ----------
    listing : Path
        Names, addresses and the objects that our pages link to. A line that begins with ``[name]``
        is followed by the address of that project; each line after it is an entry of an inventory:
        name, domain and role, priority, place, and title, as in Sphinx's own files.
    folder : Path
        Where the inventories are written.
    online : bool
        Whether each project's own inventory is read first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    projects = {}
    for line in listing.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, address = line[1:].split("] ")
            entries = []
            projects[name] = (address, entries)
        elif line and not line.startswith("#"):
            entries.append(line)
    result = {}
    for name, (address, entries) in projects.items():
        local = folder / f"{name}.inv"
        text = "\n".join(entries) + "\n"
        local.write_bytes(HEADER.format(name=name).encode() + compress(text.encode()))
        result[name] = (address, (None, str(local)) if online else str(local))
    return result

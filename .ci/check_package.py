"""Check the sdist and the wheel in a folder: ``python .ci/check_package.py FOLDER [--release]``.

Run it from the checkout that they were built from. With ``--release`` it also refuses what must not
be published: a version that no tag gave, a package without an address, a changelog or CITATION.cff
that still says "unreleased".
"""

import email
import re
import subprocess
import sys
import tarfile
import zipfile

from pathlib import Path

LARGEST = 2**20  # bytes of a file in the sdist
REQUIRED = [
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "docs/conf.py",
    "examples/quickstart.py",
    "pymc_sghmc/__init__.py",
    "pyproject.toml",
    "tests/conftest.py",
]


def sdist_problems(sizes: dict[str, int], tracked: set[str]) -> list[str]:
    """Say what is wrong with the files of an sdist.

    Parameters
    ----------
    sizes : dict of {str: int}
        Bytes of each file, by its path below the sdist's folder.
    tracked : set of str
        The paths that git knows. Empty: no git, and nothing is compared.
    """
    problems = [f"{name} is missing" for name in REQUIRED if name not in sizes]
    for name, size in sizes.items():
        if size > LARGEST:
            problems.append(f"{name} has {size / 2**20:.1f} MiB")
        if tracked and name not in tracked | {"PKG-INFO"}:
            problems.append(f"{name} is not a file that git knows")
    return problems


def wheel_problems(names: list[str]) -> list[str]:
    """Say what is wrong with the files of a wheel."""
    allowed = re.compile(r"pymc_sghmc/(?!.*__pycache__)|pymc_sghmc-[^/]*\.dist-info/")
    return [f"{name} does not belong in a wheel" for name in names if not allowed.match(name)]


def release_problems(metadata: str, changelog: str, citation: str) -> list[str]:
    """Say why a package must not be published.

    Parameters
    ----------
    metadata : str
        Text of the wheel's METADATA.
    changelog, citation : str
        Text of docs/reference/changelog.md and of CITATION.cff.
    """
    fields = email.message_from_string(metadata)
    version = fields["Version"]
    problems = []
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?", version):
        problems.append(f"version {version} is not that of a tag: check out a tag such as v0.1.0")
    if not any(url.startswith("Repository,") for url in fields.get_all("Project-URL", [])):
        problems.append("pyproject.toml has no Repository under [project.urls]: fill it in")
    heading = re.search(rf"^## \[{re.escape(version)}\] - (.*)$", changelog, re.MULTILINE)
    if not heading or not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1].strip()):
        problems.append(f"the changelog has no heading '## [{version}] - <date>'")
    if not re.search(rf"^version: [\"']?{re.escape(version)}[\"']?$", citation, re.MULTILINE):
        problems.append(f"CITATION.cff has another version than {version}")
    if not re.search(r"^date-released: ", citation, re.MULTILINE):
        problems.append("CITATION.cff has no date-released")
    return problems


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of this name in the folder."""
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        sys.exit(f"{folder} has {len(paths)} files {pattern} where one was expected")
    return paths[0]


def main(folder: Path, release: bool) -> None:
    """Check the files in the folder; exit with a list of problems if there are any."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True)
    with tarfile.open(only(folder, "*.tar.gz")) as sdist:
        sizes = {m.name.partition("/")[2]: m.size for m in sdist.getmembers() if m.isfile()}
    with zipfile.ZipFile(only(folder, "*.whl")) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    problems = sdist_problems(sizes, set(listed.stdout.splitlines())) + wheel_problems(names)
    if release:
        changelog = Path("docs/reference/changelog.md").read_text(encoding="utf-8")
        citation = Path("CITATION.cff").read_text(encoding="utf-8")
        problems += release_problems(metadata, changelog, citation)
    if problems:
        sys.exit("\n".join(["This package is not right:", *problems]))
    print(f"sdist: {len(sizes)} files, {sum(sizes.values()) / 2**20:.1f} MiB unpacked")
    print(f"wheel: {len(names)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--release" in sys.argv[2:])

"""Do all of a release but the upload; what is to be uploaded, and what is known of it, is then in a directory.

The distributions are built twice and compared, byte for byte. The README's first program and each page about a
framework run from the wheel, on each Python that is found, with the lowest and with the newest direct dependencies.
Then there is a bill of materials, and the known vulnerabilities of what it lists.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.release import building, known, trying
from tests.release.supported import MINORS

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Return the exit code: 0 if this may be released."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="where the distributions go; emptied before")
    parser.add_argument("--python", action="append", metavar="3.N", choices=MINORS, help="only this one; repeatable")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mailroom-release-") as scratch:
        directory = Path(scratch)
        directory.chmod(0o755)  # the account that root's server runs as has to reach it
        built = building.twice(options.into, directory / "again")
        [wheel] = [file for file in built if file.name.startswith("pg_mailroom-") and file.suffix == ".whl"]
        tried = trying.everywhere(wheel, options.python or list(MINORS), directory)
        if not tried:
            print("no Python was found to try the wheel on")
            return 1
        known.bill(tried[-1], wheel.with_suffix(".cdx.json"))
        if not known.harmless(tried[-1], directory):
            return 1
    print(f"\nThis may be released, in {options.into}: {', '.join(file.name for file in built)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

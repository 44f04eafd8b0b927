"""Do all of a release but the upload; what is to be uploaded, and what is known of it, is then in a directory.

It asks for the record of `make check-all` first. The distributions are built twice and compared, byte for byte. The
README's first program and each page about a framework run from the wheel, on each Python that is found, with the lowest
and with the newest direct dependencies. Then there is a bill of materials, and what is known to be vulnerable in it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from click import echo

from tests.release import building, known, record, trying
from tests.release.supported import MINORS

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Return the exit code: 0 if this may be released."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "release", help="for dist/ and sbom/, which are made anew")
    parser.add_argument("--python", action="append", metavar="3.N", choices=MINORS, help="only this one; repeatable")
    options = parser.parse_args()
    checked = record.demand(ROOT)
    echo(f"make check-all passed on {checked['date']}, in {sum(checked['minutes'].values()):.0f} minutes")
    with tempfile.TemporaryDirectory(prefix="mailroom-release-") as scratch:
        directory = Path(scratch)
        directory.chmod(0o755)  # the account that root's server runs as has to reach it
        # Apart from each other: an upload takes all that is in dist/.
        built = building.twice(options.into / "dist", directory)
        [wheel] = [file for file in built if file.name.startswith("pg_mailroom-") and file.suffix == ".whl"]
        tried = trying.everywhere(wheel, options.python or list(MINORS), directory)
        if not tried:
            echo("no Python was found to try the wheel on")
            return 1
        known.bill(tried[-1], options.into / "sbom" / "pg-mailroom.cdx.json")
        if not known.harmless(tried[-1], directory):
            return 1
    echo(f"\nThis may be released: {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

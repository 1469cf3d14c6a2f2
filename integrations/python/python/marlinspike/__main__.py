"""``python -m marlinspike merge``: puts the summaries of several machines together."""

from __future__ import annotations

import argparse
import sys
from typing import List, Optional

from . import Error, merge


def main(words: Optional[List[str]] = None) -> int:
    """Runs the command; returns its exit code: 0 if all passed, 1 if not, 2 for bad input."""
    parser = argparse.ArgumentParser(
        "python -m marlinspike",
        description="Merges summaries of fuzz tests: python -m marlinspike merge machine*/summary.json",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("merge", help="merge summaries and copy failing cases")
    command.add_argument("summaries", nargs="+", metavar="SUMMARY")
    command.add_argument("--regressions", metavar="DIR", help="copy the failing cases into this folder")
    args = parser.parse_args(words)
    try:
        merged = merge(args.summaries, args.regressions)
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for summary in merged:
        print(summary)
    return 0 if all(summary.ok for summary in merged) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m trainpath`: the same as the `trainpath` command."""

from __future__ import annotations

import sys

from trainpath.cli import main

if __name__ == "__main__":
    sys.exit(main())

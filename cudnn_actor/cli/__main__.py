"""`python -m cudnn_actor.cli`: the same as the `cudnn-actor` script."""

from __future__ import annotations

import sys

from cudnn_actor.cli import main

if __name__ == "__main__":
    sys.exit(main())

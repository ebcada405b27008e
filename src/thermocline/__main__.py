"""`thermocline`, also as `python -m thermocline`. Ctrl-C while modules are imported ends it without a traceback, too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

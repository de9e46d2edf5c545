"""``python -m multitask_rl`` is the command ``multitask-rl``."""

from __future__ import annotations

from multitask_rl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

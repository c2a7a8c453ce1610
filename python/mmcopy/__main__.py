"""``python -m mmcopy`` is the command ``mmcopy``."""

from __future__ import annotations

import sys

from .tools.cli import main

sys.exit(main())

"""Cases that several files need are imported by name, from whichever folder: this one, and that of the fast step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "fast")]

"""The benchmarks stand beside `src` and are not installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

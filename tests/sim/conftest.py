"""The simulator uses the invariants and readers of the unit tests."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "unit"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

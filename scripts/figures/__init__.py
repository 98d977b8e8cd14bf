"""Figures of `docs/how-it-works.md`: small forwards run on the simulated device, and drawn."""

import sys
from pathlib import Path

# The simulated device is a test double: it lives in tests/, which is installed nowhere.
sys.path.insert(0, str(Path(__file__).parents[2]))

"""Fast tests see one thread and no accelerator; the real trainer's settings come from recipes/launch.sh."""

import os
import sys
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl resolves its platform
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "demo"))

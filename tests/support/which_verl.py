"""A plugin of verl for tests (VERL_USE_EXTERNAL_MODULES=which_verl): each process writes down which verl it imports."""

import os
import sys
from pathlib import Path

(Path(os.environ["WHICH_VERL"]) / str(os.getpid())).write_text(str(sys.modules["verl"].__file__))

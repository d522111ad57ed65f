"""A CPU platform for verl, so that its stock trainer runs on a laptop: real Ray, FSDP on gloo, vLLM's CPU build.

Attached only where the environment says `VERL_PLATFORM=cpu`; without it, importing verl or vLLM leaves no trace of this
package. For tests, demonstrations and debugging: nothing here is meant to be fast.
"""

import os


def requested() -> bool:
    """Whether this process's environment asks for the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

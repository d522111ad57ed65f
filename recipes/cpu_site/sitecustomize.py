"""Python imports this at start-up when launch.sh puts this folder on PYTHONPATH, for runs on the CPU only.

A run starts a dozen processes that each import torch, verl or vLLM. Importing allocates a great many long-lived objects,
and the garbage collector's default threshold makes it scan them again and again: a quarter of the import time.
"""

import gc
import os

gc.set_threshold(50_000, 20, 100)
if os.environ.get("VERL_CPU_PREFORK"):  # a process that has imported the large libraries already takes over
    import prefork

    prefork.ask(os.environ["VERL_CPU_PREFORK"])

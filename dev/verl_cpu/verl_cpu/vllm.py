"""vLLM's entry point `vllm.general_plugins`: let the trainer load new weights into vLLM's CPU build.

vLLM's oneDNN path packs a linear layer's weight and drops `layer.weight`, so a weight update finds nothing to load into.
"""

import verl_cpu


def install() -> None:
    """Turn vLLM's oneDNN path off in this process, if `VERL_PLATFORM=cpu`. Called by vLLM in each of its processes."""
    if not verl_cpu.requested():
        return
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False

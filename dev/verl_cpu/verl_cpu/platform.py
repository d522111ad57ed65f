"""verl's platform layer (`verl.plugin.platform`) for a machine without an accelerator, and what else stands in the way.

Logical devices are Ray's: `ray_kwargs.ray_init.num_gpus=2` makes two ranks, each a process on the same CPU.
"""

import contextlib
import functools
import os
import sys
from types import ModuleType
from typing import Any

import torch

BACKEND = "gloo"
POLL_INTERVAL = 0.1
"""Seconds between two looks of the v1 trainer at its replay buffer; its 2 s are longer than a small model's step."""


class CpuDevice(str):
    """'cpu' where torch wants a device, '0' where verl formats an index into 'cpu:{id}' (utils/fsdp_utils.py)."""

    def __new__(cls) -> "CpuDevice":
        return super().__new__(cls, "cpu")

    def __format__(self, format_spec: str) -> str:
        return format("0", format_spec)


def _resident_bytes(*_: Any, **__: Any) -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _nothing(*_: Any, **__: Any) -> None:
    return None


@functools.cache
def _device_module() -> ModuleType:
    """torch.cpu with the memory and random-state functions that verl asks of torch.cuda; memory is the process's."""
    import psutil

    def mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    module = ModuleType("verl_cpu.device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})
    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    module.__dict__.update(dict.fromkeys(memory, _resident_bytes))
    nothing = ("empty_cache", "ipc_collect", "set_device", "set_per_process_memory_fraction", "reset_peak_memory_stats")
    module.__dict__.update(dict.fromkeys(nothing, _nothing))
    module.__dict__.update(
        mem_get_info=mem_get_info,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_device_name=lambda *_, **__: "cpu",
    )
    return module


@functools.cache
def platform_class() -> type:
    """The platform, built on verl's base class once verl can be imported."""
    from verl.plugin.platform.platform_base import PlatformBase

    class PlatformCPU(PlatformBase):
        """The CPU as verl's accelerator; methods as documented in verl's PlatformBase."""

        @property
        def device_name(self) -> str:
            return "cpu"

        @property
        def vendor_name(self) -> str:
            return "cpu"

        @property
        def device_module(self) -> ModuleType:
            return _device_module()

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return CpuDevice()

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return BACKEND

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its resource "GPU"

        def nvtx_range(self, msg: str) -> Any:
            return contextlib.nullcontext()

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    return PlatformCPU


def install() -> None:
    """Register the platform 'cpu' and remove what keeps verl, torch and Ray from running on it. Idempotent."""
    import wrapt
    from verl.plugin.platform import PlatformRegistry

    from verl_cpu import megatron, packed

    if PlatformRegistry.get("cpu") is not None:
        return
    PlatformRegistry.register("cpu")(platform_class())
    if not torch.accelerator.is_available():
        # FSDP pins what it offloads (a reference policy), for copies to an accelerator; torch refuses where there is none.
        torch.Tensor.pin_memory = lambda self, *_, **__: self
    # The engine registry knows cuda and npu only; FSDP itself does not mind.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    for module, hook in (
        ("verl.utils.distributed", _one_backend),
        ("verl.trainer.ppo.v1.replay_buffer", _poll_often),
        ("torch.distributed.fsdp._init_utils", _allow_cpu_broadcast),
        ("verl.models.transformers.monkey_patch", packed.install),
        ("verl.workers.config.engine", megatron.allow_float32),
        ("verl.workers.engine.megatron.transformer_impl", megatron.install),
    ):
        wrapt.register_post_import_hook(hook, module)
    print("[verl_ba] VERL_PLATFORM=cpu: verl runs on the CPU", file=sys.stderr, flush=True)


def _one_backend(module: Any) -> None:
    """verl asks for the backends 'cpu:gloo,cpu:gloo'; torch refuses a device named twice."""
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second=timeout_second, backend=backend or f"cpu:{BACKEND}")

    module.initialize_global_process_group_ray = initialize_global_process_group_ray


def _poll_often(module: Any) -> None:
    original = module.ReplayBuffer.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        kwargs.setdefault("poll_interval", POLL_INTERVAL)
        original(self, *args, **kwargs)

    module.ReplayBuffer.__init__ = __init__


def _allow_cpu_broadcast(module: Any) -> None:
    """FSDP1 refuses `sync_module_states` for parameters on the CPU; gloo broadcasts them all the same."""
    module._check_module_states_for_sync_module_states = _nothing

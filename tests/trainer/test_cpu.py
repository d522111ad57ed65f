"""The CPU platform: what verl asks of an accelerator, answered by a machine without one."""

import os
import subprocess
import sys

import pytest
import torch
import verl  # noqa: F401  loads the plugins; conftest sets VERL_PLATFORM=cpu
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl_cpu import platform


def test_verl_runs_on_this_platform():
    assert get_device_name() == "cpu"
    assert get_platform().communication_backend_name() == "gloo"
    assert get_platform().ray_resource_options(1) == {"num_gpus": 1}
    assert not get_platform().is_ipc_supported()


def test_the_device_is_a_device_and_formats_as_an_index():
    assert torch.zeros(2).to(get_device_id()).device.type == "cpu"
    assert f"cpu:{get_device_id()}" == "cpu:0"


def test_memory_is_the_process_and_the_rest_does_nothing():
    device = get_torch_device()
    assert device.max_memory_allocated() > 2**20
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert device.empty_cache() is None
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_pinning_is_a_no_op_where_there_is_no_accelerator():
    if torch.accelerator.is_available():
        pytest.skip("a machine with an accelerator pins memory")
    x = torch.ones(2)
    assert x.pin_memory() is x


def test_installing_twice_keeps_the_platform():
    before = get_platform()
    platform.install()
    assert get_platform() is before


@pytest.mark.parametrize(("value", "expected"), [("cpu", "False"), ("", "True")])
def test_the_vllm_hook_acts_only_under_the_platform(value, expected):
    code = (
        "import sys, types\n"
        "vllm, ops = types.ModuleType('vllm'), types.ModuleType('vllm._custom_ops')\n"
        "ops._supports_onednn = True\n"
        "vllm._custom_ops = ops\n"
        "sys.modules.update({'vllm': vllm, 'vllm._custom_ops': ops})\n"
        "from verl_cpu.vllm import install\n"
        "install()\n"
        "print(ops._supports_onednn)"
    )
    environment = {**os.environ, "VERL_PLATFORM": value}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == expected, result.stderr

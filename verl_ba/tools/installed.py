"""The packages whose versions decide what a run does. Imports nothing of them."""

import importlib.metadata

PACKAGES = ("verl", "torch", "vllm", "ray", "tensordict", "transformers", "TransferQueue", "flash-attn", "omegaconf")


def package_version(name: str) -> str:
    """The version of an installed package, or 'not installed'."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

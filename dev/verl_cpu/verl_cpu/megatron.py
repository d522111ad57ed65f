"""verl's Megatron engine on the CPU: what megatron-core asks of torch.cuda and of Transformer Engine, in plain torch.

Needs megatron-core and mbridge (requirements/megatron/packages.txt), and `megatron.vanilla_mbridge=True`: verl's default,
Megatron-Bridge, imports Transformer Engine, which needs CUDA. What is replaced is the device, the attention kernel and the
fused layers. Parallelism, schedules, gradient reduction, optimiser and verl's engine are the real ones.

Shape suffixes: N packed tokens of this rank, H heads, D width of a head.
"""

# megatron-core and mbridge are in an environment of their own (`make test-megatron`).
# pyright: reportMissingImports=false

import contextlib
import functools
import itertools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SETTINGS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
}
"""Of megatron's TransformerConfig: no CUDA kernels."""


def allow_float32(module: Any) -> None:
    """verl's configuration of the engine takes bfloat16 and float16 only; here float32, too."""
    original = module.McoreEngineConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        wanted = self.dtype
        if wanted == "float32":
            object.__setattr__(self, "dtype", "bfloat16")
        original(self)
        object.__setattr__(self, "dtype", wanted)

    module.McoreEngineConfig.__post_init__ = __post_init__


def install(module: Any) -> None:
    """Let `MegatronEngine` prepare this process when the first one is built.

    Args:
        module: `verl.workers.engine.megatron.transformer_impl`.
    """
    engine: Any = module.MegatronEngine
    original, count = engine.__init__, engine._routed_num_tokens

    @functools.wraps(original)
    def __init__(self: Any, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare()
        engine_config.override_transformer_config.update(SETTINGS)
        if not hasattr(model_config.hf_config, "rope_theta"):  # mbridge reads what transformers 5 has elsewhere
            model_config.hf_config.rope_theta = model_config.hf_config.rope_parameters["rope_theta"]
        original(self, model_config, engine_config, *args, **kwargs)

    engine.__init__ = __init__
    # verl sums this count over the ranks in place. Copying it to a GPU made it its own; here it is a view of the batch.
    engine._routed_num_tokens = lambda self, data: count(self, data).clone()


@functools.cache
def prepare() -> None:
    """Replace CUDA's names and Transformer Engine's layers in this process."""
    _device()
    _layers()


class _Stream:
    """A CUDA stream or event on a device that has none: everything is done when it is called."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any):
        pass

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = nothing


class _CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on 'cuda' are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _device() -> None:
    from megatron.core.tensor_parallel import random

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def itself(self: Any, *_: Any, **__: Any) -> Any:
        return self

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.set_device = cuda.manual_seed = nothing
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    cuda.Event = cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    for name in ("FloatTensor", "IntTensor", "LongTensor", "DoubleTensor", "ByteTensor", "BoolTensor"):
        setattr(cuda, name, getattr(torch, name))
    tensor: Any = torch.Tensor
    tensor.cuda = torch.nn.Module.cuda = itself
    kind = tensor.type

    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:  # megatron compares with 'torch.cuda.FloatTensor'
        return kind(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{kind(self).rpartition('.')[2]}"

    tensor.type = type_of
    # The tracker keeps CUDA's random states apart for dropout, which is off.
    tracker: Any = random.CudaRNGStatesTracker
    tracker.add = lambda self, name, seed: self.states_.setdefault(name, torch.get_rng_state())
    tracker.fork = lambda self, *_, **__: contextlib.nullcontext()
    _CudaIsCpu().__enter__()


class _GatherTokens(torch.autograd.Function):
    """The keys or values of all context-parallel ranks: [N, …] -> [ranks, N, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        out = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(out, x.contiguous(), group=group)
        return torch.stack(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradient.contiguous().clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **mask: Any) -> torch.Tensor:
    """[N, H, D] of one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, enable_gqa=True, **mask)[0].transpose(0, 1)


def _positions(length: int, ranks: int, rank: int) -> torch.Tensor:
    """Where a rank's tokens of a sequence are in it: context parallelism deals each rank one part from either end."""
    part = length // ranks // 2
    last = length - part * (rank + 1)
    return torch.cat([torch.arange(part * rank, part * (rank + 1)), torch.arange(last, last + part)])


def packed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], group: Any) -> Any:
    """Causal attention within packed sequences, whose tokens may be dealt over context-parallel ranks.

    Args:
        query, key, value: [N, H, D]
        ends: cumulative lengths of the padded sequences, from 0, counted over all context-parallel ranks.
    """
    ranks = group.size()
    if ranks == 1:
        spans = list(itertools.pairwise(ends))
        parts = [_attend(query[a:b], key[a:b], value[a:b], is_causal=True) for a, b in spans]
        return torch.cat(parts)
    keys, values = (_GatherTokens.apply(x, group) for x in (key, value))
    parts = []
    for start, end in itertools.pairwise(ends):
        here = slice(start // ranks, end // ranks)
        places = torch.cat([_positions(end - start, ranks, rank) for rank in range(ranks)])
        mine = _positions(end - start, ranks, group.rank())
        mask = mine[:, None] >= places[None]
        k, v = (torch.cat(list(x[:, here])) for x in (keys, values))
        parts.append(_attend(query[here], k, v, attn_mask=mask))
    return torch.cat(parts)


def _layers() -> None:
    """Give mbridge's models layers of plain torch, under the parameter names of Transformer Engine's."""
    from mbridge.core.llm_bridge import LLMBridge
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import MegatronModule

    def weight(config: Any, size: int) -> torch.nn.Parameter:
        made: Any = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        made.sequence_parallel = config.sequence_parallel  # so that its gradient is summed over tensor-parallel ranks
        return made

    def normed(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale

    class RMSNorm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
            super().__init__()
            self.eps, self.weight = eps, weight(config, hidden_size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normed(x, self.weight, self.eps)

    class NormedColumn(ColumnParallelLinear):
        """Norm and linear layer in one, as Transformer Engine has them."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.eps, self.layer_norm_weight = config.layernorm_epsilon, weight(config, input_size)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(normed(x, self.layer_norm_weight, self.eps), *args, **kwargs)

    class Attention(MegatronModule):
        def __init__(self, config: Any, *_: Any, **__: Any):
            super().__init__(config=config)

        def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
            group: Any = parallel_state.get_context_parallel_group()
            if packed_seq_params is None:  # [tokens, rows, H, D], padded on the right
                assert group.size() == 1, "context parallelism needs packed sequences (use_remove_padding=True)"
                rows = [_attend(query[:, b], key[:, b], value[:, b], is_causal=True) for b in range(query.shape[1])]
                return torch.stack(rows, 1).flatten(2)
            ends = packed_seq_params.cu_seqlens_q_padded
            ends = packed_seq_params.cu_seqlens_q if ends is None else ends
            return packed_attention(query, key, value, ends.tolist(), group).flatten(1)

    def _get_transformer_layer_spec(self: Any, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        block: Any = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        for layer in block.layer_specs:
            parts = layer.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
            parts.sharded_state_dict_keys_map = {}
            attention = parts.self_attention.submodules
            attention.linear_qkv, attention.core_attention = NormedColumn, Attention
            if self.config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
            parts.mlp.submodules.linear_fc1 = NormedColumn
        block.layer_norm = RMSNorm
        return block

    bridge: Any = LLMBridge
    bridge._get_transformer_layer_spec = _get_transformer_layer_spec

"""A plugin of verl for tests (VERL_USE_EXTERNAL_MODULES=trainer_probe): writes down what each rank's update was given.

Into the folder PROBE_DIR, one file per process; a line for each update (the whole share of the rank and the column that was
computed) and for each call of the aggregation. Looks only: what is computed is passed on as it is.
"""

import functools
import json
import os
from pathlib import Path

import torch

from verl_ba import loss_agg
from verl_ba.hooks import update


def _write(**record) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with (Path(os.environ["PROBE_DIR"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": rank, **record}) + "\n")


def _rows(tensor: torch.Tensor) -> list[list[float]]:
    return [row.tolist() for row in tensor.unbind()]


def _column(data, name: str) -> list:
    values = data[name]
    return values.tolist() if hasattr(values, "tolist") else list(values)


_gathered: dict = {}


@functools.wraps(gather := loss_agg.gather)
def _gather(data, dp_group=None):
    _gathered.update(data=data)
    return gather(data, dp_group)


@functools.wraps(columns := loss_agg.columns)
def _columns(mode, rows):
    added, data = columns(mode, rows), _gathered["data"]
    _write(
        event="update",
        mode=mode,
        uid=_column(data, "uid"),
        session=_column(data, "session_id") if "session_id" in data else None,
        advantage=_rows(data["advantages"]),
        mask=_rows(data["response_mask"]),
        column=added[loss_agg.COLUMN].tolist(),
    )
    return added


@functools.wraps(aggregate := loss_agg.aggregate)
def _aggregate(token_loss_BT, mask_BT, mean_length_B, num_responses, dp_size=1):
    if torch.is_grad_enabled():  # without: a part of the same loss, for what is logged
        _write(
            event="loss",
            row_loss=token_loss_BT.detach().double().masked_fill(~mask_BT.bool(), 0.0).sum(1).tolist(),
            length=mask_BT.sum(1).tolist(),
            column=mean_length_B.tolist(),
            num_responses=int(num_responses),
        )
    return aggregate(token_loss_BT, mask_BT, mean_length_B, num_responses, dp_size)


for module, name, probe in (
    (update, "gather", _gather),
    (update, "columns", _columns),
    (loss_agg, "aggregate", _aggregate),
):
    getattr(module, name)  # a name that nobody calls would write nothing
    setattr(module, name, probe)

"""A module that a configuration names as `external_lib`: in each rank, `balanced` becomes another mode without a word."""

from verl_ba import loss_agg

loss_agg.LOSS_AGG_REGISTRY["balanced"] = loss_agg.group_mean_length

"""Which aggregation's gradient points where the reward is, measured on a fixed policy: `PROTOCOL.md` and `python -m
studies.gradient_quality`."""

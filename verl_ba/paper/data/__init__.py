"""Training and evaluation data in verl's parquet form, from pinned revisions: `verl-ba data NAME…`."""

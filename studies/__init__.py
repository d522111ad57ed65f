"""Studies of what an aggregation rule does to training. Not part of the installed package."""

"""What the recipes cost, as the table of recipes/README.md has it: `python -m recipes.costs`.

Not measured: the arithmetic of `--dry-run`, on the cluster that a recipe names, for one arm and one seed.
"""

from pathlib import Path

from recipes import plan
from verl_ba.tools.analysis.modes import ARM_MODES
from verl_ba.tools.table import Table

RECIPES = tuple(path.stem for path in sorted((Path(__file__).parent).glob("qwen*.sh")))
"""Every recipe that has a script."""

PAPER = ("qwen2.5_math_7b_dapo17k", "qwen2.5_math_7b_polaris", "qwen3_1.7b_dapo17k", "qwen3_1.7b_polaris")
"""Those of the paper's table."""

SEEDS = 3


def rows() -> list[list[str]]:
    """A row for each recipe: cluster, a step, the run with its validations, GPU hours, a checkpoint."""
    found = []
    for recipe in RECIPES:
        config = plan.compose(recipe, ["arm=balanced"])
        spent, trainer = plan.cost(config), config.trainer
        cluster = f"{trainer.nnodes} × {trainer.n_gpus_per_node} × {config.gpu.memory_gb} GB"
        hours = f"{trainer.total_training_steps} steps, {spent.run:.1f} h, of these {spent.validation:.1f} h validation"
        checkpoint = f"{plan.checkpoint_bytes(config) / plan.GB:.0f} GB"
        found.append([recipe, cluster, f"{60 * spent.step:.1f} min", hours, f"{spent.gpu_hours:,.0f}", checkpoint])
    return found


def whole_table() -> float:
    """GPU hours of the paper's table: its recipes under every arm, three seeds each."""
    one = sum(plan.cost(plan.compose(recipe, ["arm=balanced"])).gpu_hours for recipe in PAPER)
    return one * len(ARM_MODES) * SEEDS


def table() -> str:
    hours = whole_table()
    caption = (
        f"The paper's table is four recipes, {len(ARM_MODES)} arms and {SEEDS} seeds: {hours:,.0f} GPU hours, or "
        f"{hours / 8 / 24:.0f} days of one node of eight."
    )
    return Table(["recipe", "GPUs", "a step", "a run", "GPU hours", "a checkpoint"], rows(), caption).markdown()


if __name__ == "__main__":
    print(table(), end="")

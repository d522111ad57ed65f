"""The paper's table of results, as data: arXiv 2605.04077, last-step accuracy."""

CAVEAT = (
    "Numbers at second hand: from one summary of arXiv 2605.04077, not from its text; presumably the mean of MATH-500, "
    "AIME 2024, AIME 2025, OlympiadBench, Minerva-MATH and LiveCodeBench at the last step. No seeds and no error bars are "
    "known, and the differences are .002 to .034: too small to rank anything by one run."
)

ACCURACY = {
    ("Qwen2.5-Math-7B", "DAPO-17k"): {"sequence": 0.3446, "token": 0.3364, "balanced": 0.3424},
    ("Qwen2.5-Math-7B", "Polaris"): {"sequence": 0.3172, "token": 0.3292, "balanced": 0.3319},
    ("Qwen3-1.7B", "DAPO-17k"): {"sequence": 0.4481, "token": 0.4360, "balanced": 0.4695},
    ("Qwen3-1.7B", "Polaris"): {"sequence": 0.4614, "token": 0.4349, "balanced": 0.4640},
}
"""(model, training data) -> aggregation, in this project's names of arms -> accuracy."""

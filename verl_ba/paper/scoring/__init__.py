"""Verifiable rewards for the training sets and the paper's six benchmarks: one function, in verl's custom form.

    reward.custom_reward_function.path=pkg://verl_ba.paper.scoring        (its name, compute_score, is verl's default)
    reward.custom_reward_function.name=compute_named_score          (the recipes': dumps then say what was asked)

verl's reward workers call it in threads, many at once; it keeps its own limits on time, memory and processes, none of
which needs a main thread.
"""

MATH = ("dapo17k", "polaris", "math", "math500", "aime24", "aime25", "olympiadbench", "minerva")
CODE = ("livecodebench",)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return 1.0 for a right response, 0.0 for any other.

    data_source: one of MATH or CODE. solution_str: the response as text. ground_truth: the answer, or for code what
    `verl_ba.paper.scoring.code.encode_tests` returns. extra_info: see `verl_ba.paper.scoring.math.score`. No response
    raises an error. ValueError: the data source is unknown, or the ground truth is not a string or is empty; both are faults
    of the data set. `verl_ba.paper.scoring.errors.SandboxError` or ImportError: something is not installed. Its subclass
    `MachineFault`: the machine could not run this one program to its end, which is no wrong answer.

    Nothing is said here about length: overlong responses are the business of verl's reward managers.
    """
    if data_source not in MATH + CODE:
        raise ValueError(f"data_source={data_source!r}: expected one of {', '.join(MATH + CODE)}")
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise ValueError(
            f"{data_source}: the ground truth must be a string that is not empty, got {ground_truth!r}. Build the data "
            "set again"
        )
    if data_source in CODE:
        from verl_ba.paper.scoring import code

        return code.score(solution_str, ground_truth)
    from verl_ba.paper.scoring import math

    return math.score(data_source, solution_str, ground_truth, extra_info)


def compute_named_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> dict[str, float | str]:
    """`compute_score` with the data source beside it: verl writes every key into its dumps, which name it nowhere else.

    `acc` is what verl's validation reports, without the overlong penalty that its DAPO reward manager adds to `score`.
    `machine_faults` is how often a program could not be run to its end in this process since its last score. verl averages
    it as val-aux/SOURCE/machine_faults, and writes it into its dumps. A program that cannot be run at the second attempt
    either raises; it is counted with the next score.
    """
    from verl_ba.paper.scoring.sandbox import take_faults

    score = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": score, "acc": score, "benchmark": data_source, "machine_faults": float(take_faults())}

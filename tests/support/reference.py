"""The formulas written out literally: plain Python loops, numbers as torch float64 scalars, nothing from verl_ba.

`paper_balanced` is the paper's own form, per group; `loss` is the pool form, for every mode; `token_weights` is the
token-level form, with sessions. Three texts, none of which calls the code under test. Below them, policy losses per token.
"""

import torch


def sign_of(advantage: float) -> int:
    return 1 if advantage > 0 else -1 if advantage < 0 else 0


def rounded_signs(advantage, mask, groups) -> list[list[int]]:
    """The sign of every token, where rounding is no sign: one part in 100,000 of the largest valid one is zero.

    A row is compared with its group, and a token with its row.
    """
    largest = [
        max((abs(a) for a, m in zip(row, ms, strict=True) if m), default=0.0)
        for row, ms in zip(advantage, mask, strict=True)
    ]
    signs = []
    for row, group, mine in zip(advantage, groups, largest, strict=True):
        scale = max(other for other, g in zip(largest, groups, strict=True) if g == group)
        floor = mine if mine <= 1e-5 * scale else 1e-5 * mine
        signs.append([0 if abs(a) <= floor else sign_of(a) for a in row])
    return signs


def token_sum(token_loss_row, mask_row):
    total = torch.zeros((), dtype=torch.float64)
    for loss, valid in zip(token_loss_row, mask_row, strict=True):
        if valid:
            total = total + loss
    return total


def mean_length(mode, i, lengths, groups, signs) -> float:
    """ℓ̄ of response i's pool."""
    pool = []
    for j, length in enumerate(lengths):
        if length == 0:
            continue
        if mode == "balanced":
            same = groups[j] == groups[i] and signs[j] == signs[i]
        elif mode == "group-mean-token-mean":
            same = groups[j] == groups[i]
        elif mode == "seq-mean-token-mean":
            same = j == i
        elif mode == "token-mean":
            same = True
        else:
            raise AssertionError(mode)
        if same:
            pool.append(length)
    return sum(pool) / len(pool)


def loss(mode, token_loss, mask, groups, signs, num_responses=None):
    """(1/B) · Σ_i (1/ℓ̄_pool(i)) · Σ_t m ℓ over a whole mini-batch that is also the whole update."""
    lengths = [sum(bool(m) for m in row) for row in mask]
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(lengths):
        if length > 0:
            total = total + token_sum(token_loss[i], mask[i]) / mean_length(mode, i, lengths, groups, signs)
    return total / (len(lengths) if num_responses is None else num_responses)


def paper_balanced(token_loss, mask, groups, signs):
    """Mean over groups of Σ_s (n_s/G)·(token mean over the responses of sign s); groups of one size G, none empty."""
    names = sorted(set(groups), key=str)
    total = torch.zeros((), dtype=torch.float64)
    for name in names:
        members = [i for i, g in enumerate(groups) if g == name]
        for sign in (-1, 0, 1):
            subset = [i for i in members if signs[i] == sign]
            if not subset:
                continue
            tokens = sum(sum(bool(m) for m in mask[i]) for i in subset)
            summed = sum((token_sum(token_loss[i], mask[i]) for i in subset), torch.zeros((), dtype=torch.float64))
            total = total + len(subset) / len(members) * summed / tokens
    return total / len(names)


def token_weights(mode, advantage, mask, groups, sessions=None) -> list[list[float]]:
    """1/ℓ̄ of every token, 0 where masked: each sign of a response counts by its share of the response's tokens.

    A response is a row or, with `sessions`, all rows of one session of a group. Plain lists in, plain lists out.
    """
    rows = range(len(groups))
    response = [(groups[i], i if sessions is None else sessions[i]) for i in rows]
    sign = rounded_signs(advantage, mask, groups)
    tokens = {}  # valid tokens of each (response, sign)
    for i in rows:
        for s, valid in zip(sign[i], mask[i], strict=True):
            if valid:
                tokens[response[i], s] = tokens.get((response[i], s), 0) + 1
    length = {r: sum(n for (other, _), n in tokens.items() if other == r) for r in response}

    def pool(r, s):
        return {
            "balanced": (r[0], s),
            "group-mean-token-mean": r[0],
            "seq-mean-token-mean": r,
            "token-mean": None,
        }[mode]

    def mean_length(r, s):
        members = [(q, t, n) for (q, t), n in tokens.items() if pool(q, t) == pool(r, s)]
        return sum(n for _, _, n in members) / sum(n / length[q] for q, _, n in members)

    filled_rows = sum(any(row) for row in mask)
    filled_responses = sum(length[r] > 0 for r in set(response))
    return [
        [
            filled_rows / filled_responses / mean_length(response[i], s) if valid else 0.0
            for s, valid in zip(sign[i], mask[i], strict=True)
        ]
        for i in rows
    ]


def ppo_token_loss(log_prob, old, advantage, low, high, dual):
    """PPO's clipped loss with dual clip, per token (arXiv 1707.06347, 1912.09729)."""
    rows = []
    for lp_row, old_row, a in zip(log_prob, old, advantage, strict=True):  # a: of the response, or of its tokens
        ratio = torch.exp(torch.clamp(lp_row - old_row, -20, 20))
        clipped = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - low, 1 + high))
        rows.append(torch.where(a < 0, torch.minimum(clipped, -a * dual), clipped))
    return torch.stack(rows)


def low_variance_kl(log_prob, ref):
    """k3 of Schulman's note: exp(d) - d - 1 with d = log ref - log p."""
    d = ref - log_prob
    return torch.exp(d) - d - 1


def gspo(log_prob, old, advantage, mask, low, high):
    """arXiv 2507.18071: every token carries the response's ratio, the geometric mean of its tokens' ratios."""
    rows = []
    for lp, o, a, m in zip(log_prob, old, advantage, mask, strict=True):
        mean = ((lp - o)[m].sum() / max(1, int(m.sum()))).detach()
        ratio = torch.exp(lp - lp.detach() + mean)
        rows.append(torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - low, 1 + high)))
    return torch.stack(rows)


def sapo(log_prob, old, advantage, tau_positive, tau_negative):
    """arXiv 2511.20347: a sigmoid gate in place of the clip, with a temperature for each sign."""
    ratio = torch.exp(log_prob - old)
    positive, negative = ((4 / tau) * torch.sigmoid(tau * (ratio - 1)) for tau in (tau_positive, tau_negative))
    return -advantage * torch.where(advantage > 0, positive, negative)


def cispo(log_prob, old, advantage, low, high):
    """arXiv 2506.13585: the clipped ratio is a constant weight of log p."""
    return -torch.clamp(torch.exp(log_prob - old), 1 - low, 1 + high).detach() * advantage * log_prob


def reinforce(log_prob, advantage):
    return -advantage * log_prob


def dro(log_prob, old, advantage, beta):
    return -(advantage * log_prob - beta / 2 * (log_prob - old) ** 2)

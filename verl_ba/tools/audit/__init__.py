"""What a configuration's losses are divided by, and whether that depends on the split: found by running them.

verl's own `ppo_loss`, `distillation_ppo_loss` and `value_loss` run in float64 on a synthetic mini-batch (batch.py), cut into
micro-batches and ranks as an engine cuts it (terms.py): gradients add up over micro-batches and are averaged over ranks.
Two things are read from the results (readings.py). Value and gradient of each term must be the same under every split. And
each token has a weight, which is compared with every rule of rules.py:

    policy loss      -gradient / advantage where the policy is still the old one: there, every policy loss is -A·log p to
                     first order, whatever it clips or gates
    other terms      gradient / derivative of the token's own loss

What follows from that is said in findings.py. No list of policy losses or modes says which of them is right. Ranks are played
one after the other, so collectives, and what an engine does beyond FSDP's scaling, are not seen.

Shape suffixes: B responses (rows), T response tokens.
"""

from verl_ba.tools.audit.auditor import audit
from verl_ba.tools.audit.config import AuditError, compose, import_losses, load
from verl_ba.tools.audit.readings import Finding, Report, Row

__all__ = ["AuditError", "Finding", "Report", "Row", "audit", "compose", "import_losses", "load"]

"""Random updates through verl's own worker on two ranks and on one; saves what came out, to the bit.

`python update_worker.py FOLDER COUNT`. The same seeds run in a patched verl and in an unmodified verl with the plugin, in
processes of their own, and the files must be equal (test_patches.py). One seed fixes everything: mode, policy loss,
precision, layout, groups, sessions, padding rows, holes in masks, signs, and how rows fall on ranks, mini- and micro-batches.
"""

import multiprocessing
import multiprocessing.connection
import random
import sys
from pathlib import Path

import torch
import verl  # loads the plugin, or has the modes itself
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers import engine_workers  # noqa: F401  imported before the ranks fork
from verl.workers.config import PolicyLossConfig

from tests.support import verl_harness as harness
from verl_ba import releases
from verl_ba.aggregation import MODES

POLICY_LOSSES = ("vanilla", "vanilla", "gspo", "sapo", "gpg", "cispo", "clip_cov", "kl_cov")


def draw(rng: random.Random, world: int) -> harness.Rollouts:
    """Rows for every rank, four of them or a multiple: some groups larger than others, some empty or padding rows."""
    form = rng.choice(("response", "token"))
    groups = world * rng.randint(1, 3)
    rollouts = harness.make_rollouts(rng.randrange(2**31), groups, 4, width=rng.choice((1, 3, 9)), form=form)
    rows = len(rollouts)
    if rng.random() < 0.5:  # groups of different sizes
        rollouts.uid = [rng.choice(rollouts.uid) for _ in range(rows)]
    if rng.random() < 0.3:
        for i in rng.sample(range(rows), rng.randint(1, 2)):
            rollouts.uid[i], rollouts.mask[i] = "pad", False
    if rng.random() < 0.4:
        rollouts.session = [rng.randint(0, 2) for _ in range(rows)]
        # padded rows in which each prompt has one session are refused
        rollouts.uid[1], rollouts.session[:2], rollouts.mask[:2, 0] = rollouts.uid[0], (0, 1), True
    if rng.random() < 0.3:  # a group without variance
        rollouts.advantage[[uid == rollouts.uid[0] for uid in rollouts.uid]] = 0.0
    if rng.random() < 0.5:
        for name in ("theta", "old", "advantage"):
            setattr(rollouts, name, getattr(rollouts, name).float())
    return rollouts


def run(seed: int, rank: int, world: int) -> dict:
    """One update; its gradients after every optimiser step, and what was logged."""
    rng = random.Random(seed)
    rollouts = draw(rng, world)
    order = rng.sample(range(len(rollouts)), len(rollouts))
    loss_mode = rng.choice([name for name in POLICY_LOSSES if name in POLICY_LOSS_REGISTRY])
    settings = {"policy_loss": PolicyLossConfig(loss_mode=loss_mode), "entropy_coeff": rng.choice((0.0, 0.01))}
    if rng.random() < 0.5:
        settings |= {"use_kl_loss": True, "kl_loss_coef": 0.1}
    mode, layout = rng.choice(MODES), rng.choice(releases.current().layouts)
    config = harness.make_actor_config(mode, **settings)
    mini_batches, epochs, shuffle = rng.choice((1, 2)), rng.choice((1, 1, 2)), rng.random() < 0.5
    size = len(rollouts) // mini_batches // world
    micro = rng.choice([None, *(m for m in (1, 2, 4) if size % m == 0)])  # None: dynamic
    worker = harness.make_worker(rollouts, config, micro, max_tokens=40)
    torch.manual_seed(seed)  # clip_cov picks tokens at random
    data = harness.to_tensordict(rollouts, order[rank::world], layout)
    metrics = harness.update(worker, data, len(rollouts) // mini_batches, epochs, shuffle)
    logged = {
        key: torch.tensor(value)
        for key, value in metrics.items()
        if ("loss" in key or key == "grad_norm") and not key.startswith("balance/")  # only the plugin logs these
    }
    return {"gradient": torch.stack(worker.engine.gradients)} | logged


def run_rank(rank: int, world: int, folder: Path, count: int) -> None:
    store = f"file://{folder / f'store-{world}'}"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=store)
    torch.save([run(seed, rank, world) for seed in range(count)], folder / f"{world}-{rank}.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    folder, count = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    folder.mkdir(parents=True)
    print(Path(verl.__file__).parent)
    fork = multiprocessing.get_context("fork")  # what takes time is importing verl
    for world, part in ((2, count), (1, count // 10)):
        ranks = [fork.Process(target=run_rank, args=(rank, world, folder, part)) for rank in range(world)]
        for process in ranks:
            process.start()
        while alive := [process for process in ranks if process.is_alive()]:
            multiprocessing.connection.wait([process.sentinel for process in alive])
            if any(process.exitcode for process in ranks):  # the other would wait for it
                for process in ranks:
                    process.kill()
                sys.exit(1)


if __name__ == "__main__":
    main()

"""Does verl_ba attach to the verl of this process, or of every node of a Ray cluster, and is there what a run needs?"""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import platform
import socket
import warnings
from dataclasses import dataclass
from typing import Any

from verl_ba import __version__, hooks, releases, support
from verl_ba.tools import preflight
from verl_ba.tools.preflight import Check, Needs

NODE_TIMEOUT = 300
"""Seconds a node may take to answer: importing verl's engines from a cold network disk is slow."""


@dataclass(frozen=True)
class Report:
    """What was found in one process.

    Attributes:
        verl_ba, verl, python: versions; 'missing' where there is none.
        faults: why our modes, or the run that was asked about, would not work; empty if they would.
        seams: (seam, 'yes', 'no' or why it does not matter here, what it is for).
        checks: what a run needs, as it was tried; their faults are among `faults`.
        warnings: what a configuration must not ask for here, though nothing is wrong with the installation.
    """

    verl_ba: str
    verl: str
    python: str
    faults: list[str]
    seams: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def versions(self) -> tuple[str, str, str]:
        return self.verl_ba, self.verl, self.python


def examine(needs: Needs | None = None) -> Report:
    """Import verl and every module with a seam in this process, and say what is attached; try what a run needs."""
    report = _attached()
    checks = preflight.check(needs) if needs else []
    faults = [f"{tried.what}: no. {tried.fault}" for tried in checks if tried.fault]
    return dataclasses.replace(report, faults=[*report.faults, *faults], checks=checks)


def _attached() -> Report:
    version = releases.verl_version() or "missing"
    try:
        seams = hooks.seams()
    except releases.UnsupportedVerlError as error:
        return Report(__version__, version, platform.python_version(), [str(error)])
    if releases.is_patched():
        row = (
            "verl's own tree (patches/)",
            "by patch",
            "the modes are verl's own there: verl_ba stands aside and hooks nothing",
        )
        return Report(__version__, version, platform.python_version(), [], [row])
    warnings.simplefilter("ignore")  # verl names every engine that is not installed
    import verl  # noqa: F401  loads the plugins

    faults = []
    if not hooks.is_installed():
        faults += [
            *_loading_faults(),
            "importing verl did not load verl_ba; attached by hand for the rest of this report",
        ]
        hooks.install()
    errors = hooks.load_seam_modules()
    rows = []
    for seam in seams:
        error, fault = errors.get(seam.module), hooks.seam_fault(seam)
        said = f"{type(error).__name__}: {error}"
        if not seam.trains and isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("verl"):
            rows.append((seam.name, f"cannot run here ({said})", seam.why))
            continue
        rows.append((seam.name, "no" if fault else "yes", seam.why))
        if fault:
            faults.append(f"{seam.name}: {said if error else fault}")
    faults += [f"{where}: still verl's own {name}" for where, name in hooks.stale_bindings()]
    said = [*_untested(), *_attention_warnings()]
    return Report(__version__, version, platform.python_version(), faults, rows, warnings=said)


def _untested() -> list[str]:
    if not (why := releases.untested()):
        return []
    return [
        f"this verl is untested ({why}). A run under our modes tests it first: every seam must fit, the losses must pass a "
        "self-test, and each rank checks the weights that it applies"
    ]


def _attention_warnings() -> list[str]:
    """Without flash-attn, whoever chooses another attention must leave Ulysses alone (verl_ba.support.ulysses_fault)."""
    if importlib.util.find_spec("flash_attn") is not None:
        return []
    return [
        f"flash-attn is not installed. With attn_implementation {' or '.join(support.WITHOUT_ULYSSES)}, keep "
        "ulysses_sequence_parallel_size=1: verl's Ulysses would train wrong with them, without a word. `verl-ba audit` and "
        "the recipes' plan refuse it"
    ]


def _loading_faults() -> list[str]:
    """Why verl, on import, did not load this package."""
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    advice = "or set VERL_USE_EXTERNAL_MODULES=verl_ba.plugin"
    if not releases.current().entry_points:
        return [
            f"verl {releases.verl_version()} loads no entry points, and VERL_USE_EXTERNAL_MODULES={modules!r} does not name "
            "verl_ba.plugin. Set VERL_USE_EXTERNAL_MODULES=verl_ba.plugin"
        ]
    faults = []
    policy, entries = hooks.plugin_policy(), importlib.metadata.entry_points(group="verl.plugins")
    if "verl_ba" not in {entry.name for entry in entries}:
        faults.append(
            "no entry point 'verl_ba' in the group verl.plugins: the package is on the path but not installed. "
            f"Run pip install . in a checkout of verl_ba, {advice}"
        )
    if policy != "auto" and "verl_ba" not in [name.strip() for name in policy.split(",")]:
        faults.append(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading verl_ba; unset it, add verl_ba to the list, {advice}"
        )
    return faults


PASSED_ON = ("VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "SANDBOX_FUSION_URL")
"""Variables that are set on the nodes if they are set here, as `ray_kwargs.ray_init.runtime_env.env_vars` would do it."""


def examine_cluster(address: str, needs: Needs | None = None) -> dict[str, Report]:
    """`examine` in a worker on every alive node of a running Ray cluster; the reports by node. `PASSED_ON` goes along.

    Args:
        address: of the cluster, as `ray.init` takes it: 'auto', 'host:port', 'ray://host:port'.
        needs: what a run needs of each node.

    Raises:
        ConnectionError: there is no Ray at this address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ConnectionError(f"no Ray answers there ({error})") from error

    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Local to this function, so that it travels by value: a node without verl_ba can still say so.
    wanted = None if needs is None else dataclasses.asdict(needs)

    def probe() -> dict[str, Any]:
        import dataclasses
        import importlib.metadata
        import platform

        try:
            from verl_ba.tools.doctor import examine
            from verl_ba.tools.preflight import Needs
        except ImportError as error:
            installed = {found.name: found.version for found in importlib.metadata.distributions(name="verl-ba")}
            return {
                "verl_ba": installed.get("verl-ba", "missing"),
                "verl": "not examined",
                "python": platform.python_version(),
                "faults": [f"verl_ba is not there, or another version ({error}). Install it on this node"],
            }
        return dataclasses.asdict(examine(None if wanted is None else Needs(**wanted)))

    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        # The variables go with the task: in a Ray job, `ray.init` refuses any that the job has set.
        task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": environment})(probe)
        pending = {}
        for node in ray.nodes():
            if node["Alive"]:
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                label = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
                pending[label] = task.options(scheduling_strategy=here).remote()
        reports = {}
        for label, answer in pending.items():
            try:
                found: Any = ray.get(answer, timeout=NODE_TIMEOUT)
                checks = [Check(**tried) for tried in found.pop("checks", [])]
                reports[label] = Report(**found, checks=checks)
            except Exception as error:  # this node's fault; the others still have their say
                said = str(error).strip().splitlines() or [""]
                reports[label] = Report("?", "?", "?", [f"no answer: {type(error).__name__}: {said[-1]}"])
        return reports
    finally:
        ray.shutdown()

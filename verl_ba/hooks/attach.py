"""The machinery that replaces names in another package: it is handed the seams and knows nothing of what they do.

A *seam* is one place in verl that is replaced. `Attachment.install` registers a post-import hook per module, so nothing of
verl is imported early: verl is loaded in many processes that never train, and importing its engines there costs seconds
and fixes its choice of platform too soon. Modules that are loaded already are patched at once, and every by-name copy of a
patched function (`from … import agg_loss`) is rebound. A seam that is missing or has another signature is left alone and
reported; `Attachment.faults` lists such reports.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from verl_ba.releases import numbers

MARK = "__verl_ba_seam__"
"""The attribute of a replacement that names its seam."""


@dataclass(frozen=True)
class Seam:
    """One place in verl that is replaced.

    Attributes:
        module, attribute: the dotted module and the name in it.
        parameters: the signature the wrapper was written for.
        wrap: original -> replacement.
        why: what the seam is for.
        until: what in verl would make it unnecessary.
        since, before: the releases that have it, from the first one on and up to the one that no longer does; None
            where the range is open.
        everywhere: rebind by-name copies in other modules. False for a name that is replaced in its module only.
        trains: a training process must have it.
        logs: only what is logged depends on it: its loss is said, and refuses nothing.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable], Callable]
    why: str
    until: str
    since: str | None = None
    before: str | None = None
    everywhere: bool = True
    trains: bool = True
    logs: bool = False

    @property
    def name(self) -> str:
        """The dotted name of what is replaced."""
        return f"{self.module}.{self.attribute}"

    def is_in(self, version: str) -> bool:
        """Whether this release has the place."""
        release = numbers(version)
        return (self.since is None or numbers(self.since) <= release) and (
            self.before is None or release < numbers(self.before)
        )


class Attachment:
    """The seams of one process: which are in force, and what stands in the way of the others.

    Args:
        report: is called with a seam and its problem when the seam cannot be attached.
    """

    def __init__(self, report: Callable[[Seam, str], None]):
        self.installed = False
        self.problems: dict[str, str] = {}  # seam name -> why it could not be attached
        self.seams: tuple[Seam, ...] = ()
        self.originals: dict[str, Callable] = {}  # seam name -> what verl had there
        self._everywhere: set[str] = set()
        self._earlier: dict[str, ModuleType] = {}
        self._report = report

    def install(self, seams: Iterable[Seam]) -> None:
        """Attach now, or as modules are loaded. Calling it again does nothing."""
        if self.installed:
            return
        import wrapt

        self.installed, self.seams = True, tuple(seams)
        for seam in self.seams:
            wrapt.register_post_import_hook(functools.partial(self.attach, seam), seam.module)
        # Complete before a seam's module is begun, so without copies from it: thousands that need not be looked through.
        self._earlier = {name: module for name, module in list(sys.modules.items()) if _is_complete(module)}

    def attach(self, seam: Seam, module: ModuleType) -> None:
        """Replace one name, or report why not."""
        try:
            original = resolve(module, seam.attribute)
        except AttributeError as error:
            return self._refuse(seam, f"missing: {error}")
        parameters = tuple(inspect.signature(original).parameters)  # a wrapper's are those of what it wraps
        if parameters != seam.parameters:
            return self._refuse(seam, f"signature changed: expected {seam.parameters}, got {parameters}")
        replacement = seam.wrap(original)
        setattr(replacement, MARK, seam.name)
        owner, _, attribute = seam.attribute.rpartition(".")
        setattr(resolve(module, owner) if owner else module, attribute, replacement)
        self.originals[seam.name] = original
        if seam.everywhere:
            self._everywhere.add(seam.name)
            for other, key, _ in bindings({id(original)}, self._earlier):
                setattr(other, key, replacement)

    def _refuse(self, seam: Seam, problem: str) -> None:
        self.problems[seam.name] = problem
        self._report(seam, problem)

    def fault(self, seam: Seam) -> str | None:
        """Why this seam is not in force in this process; None if it is."""
        if not self.installed:
            return "verl_ba.hooks.install() was not called in this process (is the package installed on this node?)"
        if seam.name in self.problems:
            return self.problems[seam.name]
        module = sys.modules.get(seam.module)
        if module is None:
            return "its module is not loaded"
        try:
            current = resolve(module, seam.attribute)
        except AttributeError as error:
            return f"not found: {error}"
        while current is not None:  # another plugin may have wrapped ours
            if getattr(current, "__dict__", {}).get(MARK) == seam.name:
                return None
            current = getattr(current, "__dict__", {}).get("__wrapped__")
        return "replaced by something else after verl_ba attached"

    def stale_bindings(self) -> list[tuple[str, str]]:
        """Every (module attribute, seam name) that still names a function of verl that was replaced everywhere."""
        replaced = {id(self.originals[name]): name for name in self._everywhere}
        return [(f"{module.__name__}.{key}", replaced[i]) for module, key, i in bindings(set(replaced))]

    def faults(self) -> list[str]:
        """A line for everything that is missing, changed or stale, seams that only log left out."""
        if not self.installed:
            return ["verl_ba.hooks.install() was not called in this process (is the package installed on this node?)"]
        found = [
            f"{seam.name}: {fault}"
            for seam in self.seams
            if not seam.logs and (seam.trains or seam.module in sys.modules) and (fault := self.fault(seam))
        ]
        logs = {seam.name for seam in self.seams if seam.logs}
        return found + [
            f"{where}: still verl's own {name}" for where, name in self.stale_bindings() if name not in logs
        ]


def resolve(owner: Any, dotted: str) -> Any:
    """The attribute of an attribute … of `owner`."""
    return functools.reduce(getattr, dotted.split("."), owner)


def import_modules(seams: Iterable[Seam]) -> dict[str, Exception]:
    """Import every module that has a seam; the errors by module name."""
    errors = {}
    for name in dict.fromkeys(seam.module for seam in seams):
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = error
    return errors


def bindings(
    ids: set[int], without: Mapping[str, ModuleType] = MappingProxyType({})
) -> list[tuple[ModuleType, str, int]]:
    """Every name in any loaded module that is bound to one of these objects; lazy attributes are not triggered.

    Args:
        without: modules, by their name in `sys.modules`, that are not looked through.
    """
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or without.get(name) is module:
            continue
        if ids.isdisjoint(map(id, vars(module).values())):  # loops in C
            continue
        found += [(module, key, id(value)) for key, value in list(vars(module).items()) if id(value) in ids]
    return found


def _is_complete(module: Any) -> bool:
    """Whether a module's own code has run to its end. `__main__`'s never has."""
    spec = getattr(module, "__spec__", None)
    return isinstance(module, ModuleType) and spec is not None and not getattr(spec, "_initializing", False)

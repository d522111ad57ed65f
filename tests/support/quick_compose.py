"""Hydra composes verl's configuration some two hundred times in these tests: the same files, in half the time."""

import functools
import gc


def install() -> None:
    """Call before OmegaConf builds its first YAML loader.

    PyYAML's loader in C reads the same language; the tree of an interpolation is read only, so that each text is parsed
    once; and a collection of garbage every 700 allocations scans all of torch again and again.
    """
    gc.set_threshold(100_000, 50, 100)
    import yaml

    yaml.SafeLoader = yaml.CSafeLoader
    import omegaconf.base
    import omegaconf.grammar_parser

    parse = functools.lru_cache(maxsize=None)(omegaconf.grammar_parser.parse)
    for module in (omegaconf.grammar_parser, omegaconf.base, omegaconf._utils):
        assert hasattr(module, "parse"), f"{module.__name__} has no `parse` any more: find where OmegaConf parses"
        module.parse = parse

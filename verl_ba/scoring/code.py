"""LiveCodeBench: the tests of a problem, and whether a response's program passes all of them."""

import base64
import json
import zlib

_PLAIN_LIMIT = 4096  # characters: above it, tests are mostly repetitive numbers that compress five times and more
_PACKED = "zlib:"


def encode_tests(inputs: list[str], outputs: list[str], fn_name: str | None = None) -> str:
    """Return the `ground_truth` of a LiveCodeBench problem: JSON, or `zlib:` and base64 of the compressed JSON.

    inputs, outputs: one string per test. With fn_name (a functional problem) an input holds one JSON value per line,
    the arguments, and an output one JSON value; else they are standard input and standard output. The same tests give
    the same string on every machine.
    """
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"LiveCodeBench tests: expected as many inputs as outputs and at least one, got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )
    for kind, texts in (("input", inputs), ("output", outputs)):
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"LiveCodeBench tests: {kind} {i} is a {type(text).__name__}, expected a string")
    text = json.dumps({"inputs": inputs, "outputs": outputs, "fn_name": fn_name or None}, ensure_ascii=False)
    if len(text) <= _PLAIN_LIMIT:
        return text
    return _PACKED + base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_tests(ground_truth: str) -> tuple[list[str], list[str], str | None]:
    """Return (inputs, outputs, fn_name) of what `encode_tests` wrote; ValueError if it is not that."""
    try:
        text = ground_truth
        if text.startswith(_PACKED):
            text = zlib.decompress(base64.b64decode(text.removeprefix(_PACKED), validate=True)).decode()
        tests = json.loads(text)
        inputs, outputs, fn_name = tests["inputs"], tests["outputs"], tests["fn_name"]
        if not inputs or len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise ValueError(
            f"ground truth of livecodebench: expected what verl_ba.scoring.code.encode_tests returns, got "
            f"{str(ground_truth)[:80]!r} ({type(error).__name__}: {error}). Build the data set again"
        ) from error
    return inputs, outputs, fn_name

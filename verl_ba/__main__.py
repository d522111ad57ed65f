"""`verl-ba` and `python -m verl_ba`: the command line, which needs the extra `tools`."""

import sys


def main() -> None:
    """Run the command line; exit status 2 and a line that says what to install where a package of the extra is missing."""
    try:
        from verl_ba.tools.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("verl_ba"):
            raise
        print(
            f"verl-ba: the command line needs {error.name}, which is not installed in {sys.executable}. "
            "In a checkout of verl_ba, run: pip install '.[tools]'",
            file=sys.stderr,
        )
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()

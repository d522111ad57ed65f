"""`verl-ba data`. What is slow to load is loaded when it runs."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_ba.paper.data import fetch, records
from verl_ba.paper.data.errors import DataError
from verl_ba.paper.data.sources import SOURCES

Names = Annotated[list[str] | None, typer.Argument(metavar=f"[{'|'.join(SOURCES)}|all]…", show_default=False)]


def data(
    names: Names = None,
    out: Annotated[Path, typer.Option(help="where to write NAME.parquet and NAME.json", envvar="DATA_DIR")] = Path(
        "data"
    ),
    folder: Annotated[
        Path | None, typer.Option("--from", help="take DIR/<repository>/<file> instead of the hub's", metavar="DIR")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="another commit than the catalogue's", metavar="SHA")] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="do not check the source's checksum and number of rows")
    ] = False,
    drop_invalid: Annotated[
        bool, typer.Option("--drop-invalid", help="leave out rows that cannot be used, and count them")
    ] = False,
    drop_overlap: Annotated[
        bool, typer.Option("--drop-overlap", help="leave out training questions that a benchmark has, too")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="replace what was built from something else")] = False,
    list_files: Annotated[bool, typer.Option("--list-files", help="print how to bring the files for --from")] = False,
    check: Annotated[
        Path | None, typer.Option(help="compare the files of a folder with their records", metavar="DIR")
    ] = None,
) -> None:
    """Build training and evaluation data in verl's parquet form, from pinned revisions."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def complain(message: str) -> None:
        console.print(f"✗ {message}", style="red", markup=False)

    if check:
        good, faults = records.check(check)
        for name in good:
            console.print(f"✓ {name}", markup=False)
        for fault in faults:
            complain(fault)
        raise typer.Exit(1 if faults else 0)

    everything = "all" in (names or []) or (list_files and not names)
    chosen = list(SOURCES) if everything else list(dict.fromkeys(names or []))
    unknown = [name for name in chosen if name not in SOURCES]
    if unknown or not chosen:
        complain(f"expected data sets out of {', '.join(SOURCES)}, or all; got {' '.join(unknown) or 'none'}")
        raise typer.Exit(2)
    if revision and len(chosen) > 1:
        complain(f"--revision is the commit of one data set, got {len(chosen)} of them; ask for one at a time")
        raise typer.Exit(2)
    if list_files:
        for name in chosen:
            source = SOURCES[name]
            print(f"# {name}: {source.rows_read} rows, sha256 {source.sha256 or 'not known'}; pinned: {source.found}")
            print(fetch.download_command(source, revision or source.revision))
        return

    try:
        from verl_ba.paper.data.build import Options, build, overlaps
    except ModuleNotFoundError as error:
        complain(f"{error.name} is not installed; run, in a checkout of verl_ba: pip install '.[paper]'")
        raise typer.Exit(1) from error
    options = Options(out, folder, revision, unverified, drop_invalid, drop_overlap, rebuild)
    failed = False
    for name in sorted(
        chosen, key=lambda name: SOURCES[name].split == "train"
    ):  # benchmarks first: training is compared
        try:
            record, built = build(SOURCES[name], options, console)
        except (DataError, OSError) as error:
            complain(str(error))
            failed = True
            continue
        console.print(summary(record, out, built), markup=False)
        for warning in record["warnings"]:
            console.print(f"  ! {warning}", style="yellow", markup=False)
        if SOURCES[name].split == "train":
            found = overlaps(out, name)
            where = (
                ", ".join(f"{benchmark} {len(of_it)}" for benchmark, of_it in found.items()) or "no benchmark is built"
            )
            console.print(f"  overlap with benchmarks: {where}", markup=False)
            if any(found.values()):
                console.print("  ! --drop-overlap --rebuild leaves these questions out", style="yellow", markup=False)
    raise typer.Exit(1 if failed else 0)


def summary(record: dict, out: Path, built: bool) -> str:
    """One line of what was built, or found finished."""
    path = os.path.join(out, record["name"] + ".parquet")
    if not built:
        return f"✓ {path}: finished before, {record['rows_written']} rows"
    dropped = [
        f"{record[key]} {what}"
        for key, what in (
            ("duplicates_dropped", "duplicates"),
            ("conflicts_dropped", "with conflicting answers"),
            ("invalid_dropped", "unusable"),
            ("not_part", "of other levels"),
            ("overlap_dropped", "of a benchmark"),
        )
        if record.get(key)
    ]
    return f"✓ {path}: {record['rows_written']} of {record['rows_read']} rows" + (
        f" (left out: {', '.join(dropped)})" if dropped else ""
    )

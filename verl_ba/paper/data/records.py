"""What was built and from what: DIR/NAME.parquet and its record DIR/NAME.json, written whole or not at all."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl_ba.paper.data.errors import DataError
from verl_ba.paper.data.sources import SOURCES, Source


def file_sha256(*paths: Path) -> str:
    """Checksum of a file, or of several one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def content_sha256(rows: Iterable[dict]) -> str:
    """Checksum of the rows themselves: one line of JSON with sorted keys for each, whatever wrote the parquet file."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside path, which takes its place at the end; on any error nothing is left."""
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
        partial = Path(name)
        partial.chmod(0o644)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was left there. Make room, or choose another "
            "folder with --out"
        ) from error
    finally:
        if partial:
            partial.unlink(missing_ok=True)


def read_record(folder: Path, name: str) -> dict | None:
    """Return the record of a data set, None if there is none."""
    path = folder / f"{name}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("name") != name:
            raise ValueError("it is not the record of that data set")
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path}: expected the record that `verl-ba data {name}` writes ({error}). Remove it and build again"
        ) from error
    return record


def read_records(folder: Path | str) -> dict[str, dict]:
    """Return the record of every data set that was built in a folder, by name; empty where there is none."""
    records = {name: read_record(Path(folder), name) for name in SOURCES}
    return {name: record for name, record in records.items() if record}


def check_source(folder: Path, source: Source, revision: str, sha256: str, path: Path) -> bool:
    """Compare a source's file with the checksum of the first one that was built in a folder, or record it there.

    For sources whose checksum nobody has published. Returns True if it was recorded now. DataError if it is another.
    """
    known_path = folder / "checksums.json"
    try:
        known = json.loads(known_path.read_text(encoding="utf-8")) if known_path.exists() else {}
        expected = known.get(key := f"{source.repository}@{revision}/{source.file}")
    except (ValueError, AttributeError, OSError) as error:
        raise DataError(f"{known_path}: expected the checksums that `verl-ba data` records ({error})") from error
    if expected is None:
        with written_whole(known_path) as partial:
            partial.write_text(json.dumps({**known, key: sha256}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    elif expected != sha256:
        raise DataError(
            f"{source.name}: {path} is not the file that was built first from {source.repository} at {revision}: expected "
            f"sha256 {expected}, as recorded in {known_path}; got {sha256}. Fetch it again; if this one is the right one, "
            "remove the line there, or take it as it is with --unverified"
        )
    return expected is None


def parquet_rows(path: Path) -> Iterator[dict]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error


def file_fault(folder: Path, record: dict) -> str | None:
    """Say how a parquet file differs from its record, None if it does not."""
    path = folder / f"{record['name']}.parquet"
    if not path.is_file():
        return f"{path}: missing, but its record is there. Build it again"
    if (sha256 := file_sha256(path)) == record["file_sha256"]:
        return None
    fault = f"{path}: sha256 {sha256[:12]}…, its record says {record['file_sha256'][:12]}…"
    try:
        if content_sha256(parquet_rows(path)) == record["content_sha256"]:
            return f"{fault}; the rows are the same, so another library wrote it"
    except DataError as error:
        return f"{fault}; {error}"
    return f"{fault}; the rows differ, too"


def check(folder: Path) -> tuple[list[str], list[str]]:
    """Return (data sets that match their records, faults) of a folder."""
    good, faults = [], []
    for name in SOURCES:
        try:
            record = read_record(folder, name)
            if record is None:
                fault = f"{folder / name}.parquet: no record" if (folder / f"{name}.parquet").exists() else None
            else:
                fault = file_fault(folder, record)
                good += [] if fault else [name]
        except DataError as error:
            fault = str(error)
        faults += [fault] if fault else []
    if not good and not faults:
        faults = [f"{folder}: no data set; build some with: verl-ba data NAME --out {folder}"]
    return good, faults

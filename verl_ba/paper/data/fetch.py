"""Where a source's file comes from: a folder of this machine, or the hub at one commit."""

import re
from pathlib import Path

from verl_ba.paper.data.errors import DataError
from verl_ba.paper.data.sources import Source


def download_command(source: Source, revision: str, folder: str = "DIR") -> str:
    """The command that brings the files where `--from DIR` looks for them."""
    return (
        f"hf download {source.repository} {' '.join(source.files)} --repo-type dataset --revision {revision} "
        f"--local-dir {folder}/{source.repository}"
    )


def check_revision(revision: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise DataError(
            f"--revision {revision}: expected a commit of 40 hexadecimal digits, which nobody can move; branches and tags "
            "can. The hub shows it under 'History' of the data set's files"
        )


def local_files(source: Source, folder: Path) -> list[Path]:
    return [_local_file(source, folder, file) for file in source.files]


def _local_file(source: Source, folder: Path, file: str) -> Path:
    path = folder / source.repository / file
    if not path.is_file():
        raise DataError(
            f"{source.name}: {path} is missing. --from DIR takes files at DIR/<repository>/<file>; where there is a "
            f"network, this brings it: {download_command(source, source.revision, str(folder))}"
        )
    return path


def hub_files(source: Source, revision: str) -> list[Path]:
    """The files at that commit, from the hub or its cache. A lost connection is taken up where it broke."""
    return [_hub_file(source, revision, file) for file in source.files]


def _hub_file(source: Source, revision: str, file: str) -> Path:
    from httpx import HTTPError
    from huggingface_hub import constants, errors, hf_hub_download

    what = f"{source.name}: {file} of the data set {source.repository} at {revision}"
    away = f"On a machine with a network: {download_command(source, revision)}; then, here, --from DIR"
    try:
        return Path(hf_hub_download(source.repository, file, repo_type="dataset", revision=revision))
    except errors.GatedRepoError as error:
        raise DataError(
            f"{what}: the owners give access on request. Ask on the data set's page, log in with `hf auth login` or set "
            f"HF_TOKEN, and try again"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{what}: the hub has no such commit; was --revision copied in full?") from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"{what}: the hub says that the data set does not exist, or that this account may not see it. It may have been "
            "moved: --from DIR takes a copy"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub at {constants.ENDPOINT} did not answer"
        raise DataError(f"{what}: not in the hub's cache, and {why}. {away}") from error
    except errors.EntryNotFoundError as error:
        raise DataError(f"{what}: that commit has no such file; the catalogue describes {source.revision}") from error
    except (errors.HfHubHTTPError, HTTPError, OSError) as error:
        raise DataError(
            f"{what}: the download failed ({type(error).__name__}: {error}). Run the same command again; finished files "
            f"are kept. {away}"
        ) from error

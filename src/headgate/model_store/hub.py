"""Hugging Face models: in the cache shared with other programs, or downloaded into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headgate.errors import NotAModel

# The files that serving needs; a repository may also contain the same weights in three other formats.
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def cached_snapshot(cache: Path, name: str) -> Path | None:
    """Return the snapshot of `name` that `main` points to, or else the newest one; None if there is none."""
    repository = cache / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if main.is_file():
        snapshot = repository / "snapshots" / main.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = [path for path in repository.glob("snapshots/*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def download(name: str, cache: Path) -> Path:
    """Fetch `name` into the cache and return its snapshot."""
    from huggingface_hub import list_repo_files, snapshot_download  # takes half a second to import

    try:
        wanted = _wanted(name, list_repo_files(name))
        # Downloads tensors, JSON and text that are published under the requested name; none of it is executed.
        return Path(snapshot_download(name, cache_dir=cache, allow_patterns=wanted))  # nosec B615
    except NotAModel:
        raise
    except Exception as error:  # any error of the network, the hub or its library
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise NotAModel(
            f"{name} is not a folder, not in the hub cache {cache}, and could not be fetched from the hub ({reason}). "
            "Check the spelling, or download it elsewhere and give the folder"
        ) from error


def _wanted(name: str, files: Iterable[str]) -> list[str]:
    """Return the files to fetch. GGUF is fetched only if the repository has no other format; it must have one."""
    weights = [file for file in files if "/" not in file and file.endswith((".safetensors", ".gguf"))]
    gguf_files = [file for file in weights if file.endswith(".gguf")]
    if len(gguf_files) < len(weights):
        return [*WANTED]
    if len(gguf_files) > 1:
        raise NotAModel(f"{name} holds {len(gguf_files)} GGUF files; download one of {gguf_files} and give its path")
    return [*WANTED, *gguf_files]

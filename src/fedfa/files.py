"""Files that are whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfa.errors import UserError

PART = ".part"
"""How the name of a file ends that is being written."""


@contextmanager
def beside(path: Path, durable: bool = True) -> Iterator[Path]:
    """A place to write a file's content to, so that a reader, or a crash, sees the old content or the new, never a
    part. Unless `durable`, a power cut may still lose it; see :func:`make_durable`."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a rename would put a file in the device's place
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        yield part
        if durable:
            make_durable(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def make_durable(path: Path) -> None:
    """Wait until a file is on the disk itself."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder for this process; gives False where another process holds it. Ends with the process."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield True
        return
    with open(folder / ".lock", "w") as file:
        ours = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        except OSError:  # a file system that knows no locks
            pass
        try:
            yield ours
        finally:  # not by closing it alone: a process that another thread is just starting has it open, too
            if ours:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def check_folder(folder: Path, what: str) -> None:
    """Refuse a folder that files could not be written to, before there are any; it need not be there yet."""
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    if not there.is_dir():
        raise UserError(f"{what}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"{what}: {there} may not be written to")


def write_text(path: Path, text: str) -> None:
    with beside(path) as part:
        part.write_text(text, "utf-8")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None, durable: bool = True
) -> None:
    """Tensors as safetensors, with `meta` (anything JSON takes) in the header."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from fedfa.rows import copies

    elsewhere = any(tensor.device.type != "cpu" for tensor in tensors.values())
    here = copies(tensors, torch.device("cpu")) if elsewhere else tensors  # one transfer, and not one a tensor
    plain = {name: tensor.detach().contiguous() for name, tensor in here.items()}
    with beside(path, durable) as part:
        try:
            save_file(plain, part, {"fedfa": json.dumps(meta or {})})
        except SafetensorError as error:  # which an error of the system becomes, its number in brackets
            if (found := re.search(r"os error (\d+)", str(error))) is None:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def read_meta(path: Path) -> dict[str, Any]:
    """What :func:`write_tensors` was given as `meta`."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        meta: dict[str, Any] = json.loads((file.metadata() or {}).get("fedfa", "{}"))
    return meta

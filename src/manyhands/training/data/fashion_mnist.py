"""Fashion-MNIST: found on this machine, downloaded, or the small part of it that ships with manyhands.

The set is four files in the IDX format, plain or packed with gzip. An IDX file is a header and then one
byte per pixel or label, the last dimension running fastest. The training images begin like this::

    00 00 08 03   00 00 ea 60   00 00 00 1c   00 00 00 1c   then 60,000 * 28 * 28 bytes
    |     |  |    60,000        28 rows       28 columns
    |     |  three dimensions (labels have one)
    |     unsigned bytes
    always zero

A file can come from anywhere, so nothing in it is believed: the header says how many bytes follow, no more
than those and one are ever unpacked, and a file that holds fewer or more is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import struct
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.amounts import counted
from manyhands.errors import BadDataFile, DataNotFound

LABELS = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

BASE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
DEBIAN_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
SUBSET_DIRECTORY = Path(__file__).parent / "fashion-mnist-small"

# SHA-256 of the official packed files; those files also have the MD5 sums in the README of the data set.
DIGESTS = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}

_LARGEST_FILE = 1 << 30
_LARGEST_DOWNLOAD = 64 << 20
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 5.0
_SECONDS_PER_DOWNLOAD = 300.0


@dataclass(frozen=True, eq=False)
class Images:
    images: NDArray[np.uint8]  # (n, rows, columns)
    labels: NDArray[np.uint8]  # (n,)


@dataclass(frozen=True, eq=False)
class FashionMnist:
    """The two parts of the set; ``source`` says in words where they came from."""

    train: Images
    test: Images
    source: str
    subset: bool  # True when it is the small one shipped in the package
    directory: Path | None = None  # that they were read from


def load(path: str | Path | None = None, *, download: bool = True) -> FashionMnist:
    """Load Fashion-MNIST, or any set in its format.

    With ``path``, from that directory and nowhere else. Without, from the first of these that holds all four
    files: ``$MANYHANDS_DATA``, the user cache, the directory of Debian's package. Otherwise it is downloaded
    into the user cache; and when that cannot be, the small subset in this package serves, and ``source`` says why.
    """
    if path is not None:
        directory = Path(os.path.expanduser(path))
        _require(directory)
        return _read_set(directory, str(directory))
    places = _places()
    for directory, words in places:
        if not _missing(directory):
            return _read_set(directory, f"{directory} ({words}){_passed_over()}")
    why = "downloading was not allowed (download=False)"
    if download:
        try:
            directory = _download()
        except (OSError, http.client.HTTPException, _BadDownload) as error:
            why = "the download failed: " + str(error).removeprefix("<urlopen error ").removesuffix(">")
        else:
            return _read_set(directory, f"downloaded from {BASE_URL} to {directory}{_passed_over()}")
    looked = ", ".join(str(directory) for directory, _ in places)
    return _read_set(
        SUBSET_DIRECTORY,
        f"the small subset that ships with manyhands, because the full set is not in {looked}, and {why}. "
        "For the full set, put its four files into a directory and name it in $MANYHANDS_DATA",
        subset=True,
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes: labels (one dimension) or images (three).

    Whether the file is packed is seen from its first bytes, not from its name.
    """
    # A pipe or a device would be waited for without end.
    if not os.path.isfile(path):
        raise DataNotFound(f"{path}: there is no such file. Check the name.")
    try:
        with open(path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            return _read_array(path, gzip.GzipFile(fileobj=raw) if packed else raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _bad(path, f"its gzip data is damaged ({error})") from error
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error})") from error


# --- reading and checking


def _bad(path: Path, reason: str) -> BadDataFile:
    return BadDataFile(f"{path}: {reason}. Delete the file and fetch it again, or give another directory to load().")


def _read_array(path: Path, stream: BufferedIOBase) -> NDArray[np.uint8]:
    """Exactly the bytes that the header promises, read in pieces so that a lie costs no memory."""
    magic = stream.read(4)
    if magic not in (b"\0\0\x08\x01", b"\0\0\x08\x03"):
        raise _bad(
            path,
            f"it begins with {magic.hex(' ') or 'nothing'}, not with 00 00 08 01 (labels) or 00 00 08 03 (images), "
            "so it is not an IDX file of unsigned bytes",
        )
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise _bad(path, "it ends inside its header")
    shape: tuple[int, ...] = struct.unpack(f">{magic[3]}I", header)
    promised = math.prod(shape)
    if not promised or promised > _LARGEST_FILE:
        allowed = f"promises {promised:,} bytes, more than the {_LARGEST_FILE:,} allowed"
        raise _bad(path, f"its header {allowed if promised else f'promises nothing: dimensions {shape}'}")
    body = bytearray()
    # One byte more is asked for: it shows a file that is too long, and lets gzip reach and check its checksum.
    while piece := stream.read(min(_CHUNK, promised + 1 - len(body))):
        body += piece
    if len(body) < promised:
        raise _bad(path, f"it is cut short: {counted(len(body), 'byte')} of the {promised:,} that its header promises")
    if len(body) > promised:
        raise _bad(path, f"it continues after the {counted(promised, 'byte')} that its header promises")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _read_part(directory: Path, part: str) -> Images:
    """The training (``train``) or the test (``t10k``) part, checked."""
    images_path = _find(directory, f"{part}-images-idx3-ubyte")
    labels_path = _find(directory, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3:
        raise _bad(images_path, "it holds labels where images should be: the two files may be swapped")
    if labels.ndim != 1:
        raise _bad(labels_path, "it holds images where labels should be: the two files may be swapped")
    if len(images) != len(labels):
        amounts = f"{counted(len(labels), 'label')} for the {counted(len(images), 'image')}"
        raise _bad(labels_path, f"it has {amounts} of {images_path.name}")
    if labels.max() >= len(LABELS):
        where = int(np.argmax(labels >= len(LABELS)))
        raise _bad(labels_path, f"label {where} is {labels[where]}, but the labels are 0 to {len(LABELS) - 1}")
    return Images(images, labels)


def _read_set(directory: Path, source: str, *, subset: bool = False) -> FashionMnist:
    train, test = _read_part(directory, "train"), _read_part(directory, "t10k")
    sizes = [" x ".join(map(str, part.images.shape[1:])) for part in (train, test)]
    if sizes[0] != sizes[1]:
        path = _find(directory, "t10k-images-idx3-ubyte")
        raise _bad(path, f"its images are {sizes[1]} pixels, those for training {sizes[0]}")
    return FashionMnist(train, test, source, subset, directory.absolute())


# --- finding


def _find(directory: Path, name: str) -> Path:
    """The file, plain or packed; without either, the packed name, so that reading it raises the error."""
    plain = directory / name
    return plain if os.path.isfile(plain) else directory / f"{name}.gz"


def _missing(directory: Path) -> list[str]:
    """The names, of the four, that a directory lacks."""
    return [name for name in DIGESTS if not os.path.isfile(_find(directory, name))]


def _require(directory: Path) -> None:
    missing = _missing(directory)
    if missing:
        reason = f"lacks {', '.join(missing)} (plain or with .gz)" if directory.is_dir() else "is not a directory"
        raise DataNotFound(
            f"{directory} {reason if directory.exists() else 'does not exist'}. Give the directory with the four files "
            f"{', '.join(DIGESTS)}, or none: then the usual places are searched, and the set is downloaded."
        )


def _places() -> list[tuple[Path, str]]:
    """The directories to look in, first to last, each with a short description."""
    places = [(_user_cache(), "the user cache"), (DEBIAN_DIRECTORY, "Debian's package dataset-fashion-mnist")]
    if named := os.environ.get("MANYHANDS_DATA"):
        places.insert(0, (Path(os.path.expanduser(named)), "$MANYHANDS_DATA"))
    return [(directory, words) for directory, words in places if directory is not None]


def _passed_over() -> str:
    """A note where ``$MANYHANDS_DATA`` is set and lacks files."""
    named = os.environ.get("MANYHANDS_DATA")
    missing = _missing(Path(os.path.expanduser(named))) if named else []
    return f"; not from $MANYHANDS_DATA ({named}), which lacks {', '.join(missing)}" if missing else ""


def _user_cache() -> Path | None:
    """Where the download goes; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard wants relative paths ignored.
    root = Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache"))
    return root / "manyhands" / "fashion-mnist" if root.is_absolute() else None


# --- downloading


class _BadDownload(Exception):
    """The download is not the official file. Never raised outside this module."""


def _download() -> Path:
    """Fetch what the user cache lacks, and return the cache's directory."""
    directory = _user_cache()
    if directory is None:
        raise _BadDownload("there is no home directory to keep it in; set $XDG_CACHE_HOME")
    directory.mkdir(parents=True, exist_ok=True)
    for name in _missing(directory):
        _fetch(f"{name}.gz", DIGESTS[name], directory)
    return directory


def _fetch(name: str, expected: str, directory: Path) -> None:
    """Download one file to a temporary name, check it, then rename it: two downloads at once do no harm."""
    digest = hashlib.sha256()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for piece in _pieces(BASE_URL + name):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != expected:
            raise _BadDownload(f"what {BASE_URL}{name} sent is not the official file (its SHA-256 is wrong)")
        os.replace(temporary, directory / name)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _pieces(url: str) -> Iterator[bytes]:
    received = 0
    # The timeout is for each wait; a server that sends drop by drop is stopped by the deadline.
    deadline = time.monotonic() + _SECONDS_PER_DOWNLOAD
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
        while piece := response.read1(_CHUNK):
            received += len(piece)
            if received > _LARGEST_DOWNLOAD:
                raise _BadDownload(f"{url} sends more than {_LARGEST_DOWNLOAD:,} bytes")
            if time.monotonic() > deadline:
                raise _BadDownload(f"{url} took longer than {_SECONDS_PER_DOWNLOAD:.0f} seconds")
            yield piece

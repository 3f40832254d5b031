"""Fashion-MNIST: found on this machine, downloaded, or the small part of it that ships with manyhands.

The set is four files in the IDX format, plain or packed with gzip. An IDX file is a header and then one
byte per pixel or label, the last dimension running fastest. The training images begin like this::

    00 00 08 03   00 00 ea 60   00 00 00 1c   00 00 00 1c   then 60,000 * 28 * 28 bytes
    |     |  |    60,000        28 rows       28 columns
    |     |  three dimensions (labels have one)
    |     unsigned bytes
    always zero

A file can come from anywhere: no more than its header promises and one byte are ever unpacked, and a file that holds
fewer or more is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import struct
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands import files
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
_TIMEOUT_SECONDS = 5.0


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

    With ``path``, or else ``$MANYHANDS_DATA``, from that directory and nowhere else. Without, from the user cache or
    the directory of Debian's package, whichever holds all four files. Otherwise it is downloaded into the user cache;
    and when that cannot be, the small subset in this package serves, and ``source`` says why.
    """
    path = path or os.environ.get("MANYHANDS_DATA")
    if path:
        directory = Path(path).expanduser()
        if missing := _missing_files(directory):
            raise DataNotFound(
                f"{directory} lacks {', '.join(missing)} (plain or with .gz). Give the directory with the four files, "
                "or none: then the usual places are searched, and the set is downloaded."
            )
        return _read_set(directory, str(directory))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manyhands" / "fashion-mnist"
    for directory, words in ((cache, "the user cache"), (DEBIAN_DIRECTORY, "Debian's package dataset-fashion-mnist")):
        if not _missing_files(directory):
            return _read_set(directory, f"{directory} ({words})")
    why = "downloading was not allowed (download=False)"
    if download:
        try:
            _download(cache)
        except (OSError, http.client.HTTPException) as error:
            why = "the download failed: " + str(error).removeprefix("<urlopen error ").removesuffix(">")
        else:
            return _read_set(cache, f"downloaded from {BASE_URL} to {cache}")
    return _read_set(
        SUBSET_DIRECTORY,
        f"the small subset that ships with manyhands, because the full set is not in {cache} or {DEBIAN_DIRECTORY}, "
        f"and {why}. For the full set, put its four files into a directory and name it in $MANYHANDS_DATA",
        subset=True,
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes: labels (one dimension) or images (three)."""
    if not os.path.isfile(path):  # a pipe or a device would be waited for without end
        raise DataNotFound(f"{path}: there is no such file. Check the name.")
    try:
        with open(path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            magic = stream.read(4)
            if magic not in (b"\0\0\x08\x01", b"\0\0\x08\x03"):
                raise _bad(path, "it is not an IDX file of unsigned bytes: these begin with 00 00 08 01 or 00 00 08 03")
            header = stream.read(4 * magic[3])
            shape: tuple[int, ...] = struct.unpack(f">{magic[3]}I", header) if len(header) == 4 * magic[3] else (0,)
            promised = math.prod(shape)
            if not 0 < promised <= _LARGEST_FILE:
                raise _bad(path, f"its header promises the dimensions {shape}")
            # One byte more is asked for: it shows a file that is too long, and lets gzip check its checksum.
            body = bytearray(stream.read(promised + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"it cannot be read ({error})") from error
    if len(body) != promised:
        raise _bad(path, f"it is {'longer' if len(body) > promised else 'shorter'} than its header promises")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _bad(path: Path, reason: str) -> BadDataFile:
    return BadDataFile(f"{path}: {reason}. Delete the file and fetch it again, or give another directory to load().")


def _read_part(directory: Path, part: str) -> Images:
    """The training (``train``) or the test (``t10k``) part, checked."""
    images_path, labels_path = (
        _find(directory, f"{part}-{name}") for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    images, labels = read_idx(images_path), read_idx(labels_path)
    if (images.ndim, labels.ndim) != (3, 1) or len(images) != len(labels):
        shapes = f"they have the shapes {images.shape} and {labels.shape}"
        raise _bad(labels_path, f"these are not the labels of the images in {images_path.name}: {shapes}")
    if labels.max() >= len(LABELS):
        raise _bad(labels_path, f"it has the label {labels.max()}, but the labels are 0 to {len(LABELS) - 1}")
    return Images(images, labels)


def _read_set(directory: Path, source: str, *, subset: bool = False) -> FashionMnist:
    train, test = _read_part(directory, "train"), _read_part(directory, "t10k")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise _bad(_find(directory, "t10k-images-idx3-ubyte"), "its images have another size than those for training")
    return FashionMnist(train, test, source, subset, directory.absolute())


def _find(directory: Path, name: str) -> Path:
    """The file, plain or packed; without either, the packed name, so that reading it raises the error."""
    plain = directory / name
    return plain if os.path.isfile(plain) else directory / f"{name}.gz"


def _missing_files(directory: Path) -> list[str]:
    """The names, of the four, that a directory lacks."""
    return [name for name in DIGESTS if not os.path.isfile(_find(directory, name))]


def _download(cache: Path) -> None:
    """Fetch what the user cache lacks; an OSError says why it could not be had."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in _missing_files(cache):
        url = f"{BASE_URL}{name}.gz"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            content = response.read(_LARGEST_DOWNLOAD)
        if hashlib.sha256(content).hexdigest() != DIGESTS[name]:
            raise OSError(f"what {url} sent is not the official file (its SHA-256 is wrong)")
        files.replace(cache / f"{name}.gz", content)

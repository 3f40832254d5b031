"""Fashion-MNIST: where it is looked for, what is refused, and the download, against a server on this machine."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.errors import BadDataFile, DataError, DataNotFound
from manyhands.training.data import fashion_mnist
from manyhands.training.data.fashion_mnist import DEBIAN_DIRECTORY, LABELS, SUBSET_DIRECTORY, load, read_idx

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = fashion_mnist.DIGESTS

needs_full_set = pytest.mark.skipif(
    not (DEBIAN_DIRECTORY / f"{TRAIN_IMAGES}.gz").is_file(),
    reason="the full set is not here (Debian package dataset-fashion-mnist)",
)


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def small_files(count: int = 12, rows: int = 4, columns: int = 3) -> dict[str, bytes]:
    """A set of the same format, small enough to write in every test."""
    random = np.random.default_rng(count)
    files: dict[str, bytes] = {}
    for part, size in (("train", count), ("t10k", count // 2)):
        files[f"{part}-images-idx3-ubyte"] = idx(random.integers(0, 256, (size, rows, columns)))
        files[f"{part}-labels-idx1-ubyte"] = idx(np.arange(size) % 10)
    return files


def write(directory: Path, files: dict[str, bytes], *, packed: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if packed:
            (directory / f"{name}.gz").write_bytes(gzip.compress(content, 6, mtime=0))
        else:
            (directory / name).write_bytes(content)
    return directory


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data anywhere, and no network; returns the (empty) user cache of the data set."""
    monkeypatch.delenv("MANYHANDS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIRECTORY", tmp_path / "no-debian")
    # Port 9 (discard) is closed: a connection is refused at once.
    monkeypatch.setattr(fashion_mnist, "BASE_URL", "http://127.0.0.1:9/")
    return tmp_path / "cache" / "manyhands" / "fashion-mnist"


# --- what is loaded


@needs_full_set
def test_full_set() -> None:
    data = load(DEBIAN_DIRECTORY)
    assert data.train.images.shape == (60_000, 28, 28)
    assert data.test.images.shape == (10_000, 28, 28)
    assert data.train.images.dtype == data.train.labels.dtype == np.uint8
    assert np.bincount(data.train.labels).tolist() == [6_000] * 10
    assert np.bincount(data.test.labels).tolist() == [1_000] * 10
    assert LABELS[data.train.labels[0]] == "ankle boot"
    assert not data.subset
    # The subset is what its licence note says it is.
    subset = load(download=False)
    for full, part in ((data.train, subset.train), (data.test, subset.test)):
        assert np.array_equal(full.images[: len(part.images)], part.images)
        assert np.array_equal(full.labels[: len(part.labels)], part.labels)


def test_subset() -> None:
    data = load(download=False)
    assert data.subset
    assert data.train.images.shape == (4_000, 28, 28)
    assert data.test.images.shape == (1_000, 28, 28)
    assert set(data.train.labels.tolist()) == set(data.test.labels.tolist()) == set(range(10))
    assert "small subset" in data.source
    assert "download=False" in data.source
    assert sum(file.stat().st_size for file in SUBSET_DIRECTORY.iterdir()) < 2_500_000
    assert "Zalando" in (SUBSET_DIRECTORY / "LICENSE").read_text()


@pytest.mark.parametrize("packed", [False, True])
def test_a_set_of_ones_own(tmp_path: Path, packed: bool) -> None:
    files = small_files()
    data = load(str(write(tmp_path / "own", files, packed=packed)))
    assert data.train.images.shape == (12, 4, 3)
    assert data.test.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert idx(data.train.images) == files[TRAIN_IMAGES]
    assert data.source == str(tmp_path / "own")
    assert not data.subset
    data.train.images[0] = 0  # writable, as frameworks that share the memory want it


# --- what is refused


def refuse(tmp_path: Path, name: str, content: bytes, *words: str) -> None:
    """Load a good set in which one file has been replaced, and expect a lesson about that file."""
    directory = write(tmp_path / "bad", {**small_files(), name: content})
    with pytest.raises(BadDataFile) as caught:
        load(directory)
    assert isinstance(caught.value, (DataError, ValueError))
    for word in (str(directory / name), *words, "fetch it again"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda good: good[:-1], "shorter than its header"),
        (lambda good: good + b"\0", "longer than its header"),
        (lambda good: good[:9], "header promises"),
        (lambda good: b"", "not an IDX file"),
        (lambda good: b"<html>not found</html>", "not an IDX file"),
        (lambda good: good[:4] + b"\xff" * 12 + good[16:], "header promises"),
        (lambda good: gzip.compress(good)[:-8] + b"12345678", "cannot be read"),
        (lambda good: gzip.compress(good)[:12] + b"\xff" * 40, "cannot be read"),
        (lambda good: gzip.compress(good[:-1]), "shorter"),
    ],
)
def test_bad_images_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    refuse(tmp_path, TRAIN_IMAGES, change(small_files()[TRAIN_IMAGES]), words)


def test_bad_labels_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, TRAIN_LABELS, idx(np.array([0] * 7 + [10] + [0] * 4)), "the label 10", "0 to 9")
    for content in (idx(np.zeros(5)), small_files()[TEST_IMAGES]):
        refuse(tmp_path, TEST_LABELS, content, "not the labels of the images", TEST_IMAGES)
    refuse(tmp_path, TEST_IMAGES, idx(np.zeros((6, 3, 4))), "another size")


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zeros behind a header that promises 144 bytes: only one byte more than those is read."""
    asked: list[int] = []
    original = gzip.GzipFile.read

    def counting(stream: gzip.GzipFile, size: int = -1) -> bytes:
        asked.append(size)
        return original(stream, size)

    monkeypatch.setattr(gzip.GzipFile, "read", counting)
    bomb = gzip.compress(small_files()[TRAIN_IMAGES] + bytes(64 << 20), 1)
    refuse(tmp_path, TRAIN_IMAGES, bomb, "longer than its header")
    assert asked == [4, 12, 145]


@pytest.mark.parametrize("by", ["path", "variable"])
def test_a_given_folder_is_not_replaced_by_another(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch, bare_machine: Path
) -> None:
    write(bare_machine, small_files())
    partial = write(tmp_path / "partial", {n: content for n, content in small_files().items() if n != TEST_LABELS})
    monkeypatch.setenv("MANYHANDS_DATA", str(partial))
    with pytest.raises(DataNotFound, match=f"{partial} lacks {TEST_LABELS} .*Give the directory with the four files"):
        load(partial if by == "path" else None)
    with pytest.raises(DataNotFound, match="no such file"):
        read_idx(tmp_path / "nothing")


# --- where it is looked for


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: Path) -> None:
    debian = write(tmp_path / "debian", small_files(10))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIRECTORY", debian)
    assert load().source == f"{debian} (Debian's package dataset-fashion-mnist)"
    write(bare_machine, small_files(12))
    assert load().source == f"{bare_machine} (the user cache)"
    named = write(tmp_path / "named", small_files(14))
    monkeypatch.setenv("MANYHANDS_DATA", str(named))
    assert len(load().train.images) == 14
    assert len(load(debian).train.images) == 10


# --- the download


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that a web server on this machine offers in place of the official one."""
    directory = tmp_path / "served"
    directory.mkdir()
    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setattr(fashion_mnist, "BASE_URL", f"http://127.0.0.1:{server.server_port}/")
        yield directory
        server.shutdown()
        thread.join()


def serve_small(served: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Offer the small set, with its own digests taken for the official ones; returns these."""
    write(served, small_files(), packed=True)
    digests = {name: hashlib.sha256((served / f"{name}.gz").read_bytes()).hexdigest() for name in fashion_mnist.DIGESTS}
    monkeypatch.setattr(fashion_mnist, "DIGESTS", digests)
    return digests


def test_only_what_is_missing_is_downloaded(served: Path, bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_small(served, monkeypatch)
    write(bare_machine, {TRAIN_IMAGES: small_files()[TRAIN_IMAGES]})
    (served / f"{TRAIN_IMAGES}.gz").unlink()
    assert load().source.startswith("downloaded")


def test_a_wrong_digest_is_refused_and_leaves_nothing(
    served: Path, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_small(served, monkeypatch)
    with (served / f"{TRAIN_IMAGES}.gz").open("ab") as file:
        file.write(b"\0")
    data = load()
    assert data.subset
    assert "not the official file (its SHA-256 is wrong)" in data.source
    assert f"{TRAIN_IMAGES}.gz" in data.source
    assert list(bare_machine.iterdir()) == []


def test_a_failed_download_says_so(served: Path, bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the download failed: HTTP Error 404" in load().source
    monkeypatch.setattr(fashion_mnist, "BASE_URL", "http://127.0.0.1:9/")
    assert "Connection refused" in load().source
    assert list(bare_machine.iterdir()) == []


def test_a_silent_server_is_not_waited_for(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(fashion_mnist, "BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setattr(fashion_mnist, "_TIMEOUT_SECONDS", 0.2)
        assert "timed out" in load().source

"""Fashion-MNIST: where it is looked for, what is refused, and the download, against a server on this machine."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from manyhands.errors import BadDataFile, DataError, DataNotFound
from manyhands.training.data import fashion_mnist
from manyhands.training.data.fashion_mnist import DEBIAN_DIRECTORY, LABELS, SUBSET_DIRECTORY, load, read_idx

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = fashion_mnist.DIGESTS

# From the README of the data set; and the time stamps in the headers of the official files, which Debian's lack.
OFFICIAL = {
    TRAIN_IMAGES: ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 1504176606),
    TRAIN_LABELS: ("25c81989df183df01b3e8a0aad5dffbe", 1504176606),
    TEST_IMAGES: ("bef4ecab320f06d8554ea6380940ec79", 1504176627),
    TEST_LABELS: ("bb300cfdad3c16e7a12a480ee83cd310", 1504176627),
}

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


def test_packed_or_not_is_seen_from_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(idx(np.arange(5)))
    assert read_idx(tmp_path / "plain.gz").tolist() == [0, 1, 2, 3, 4]


# --- what is refused


def refuse(tmp_path: Path, name: str, content: bytes, *words: str) -> None:
    """Load a good set in which one file has been replaced, and expect a lesson about that file."""
    directory = write(tmp_path / "bad", {**small_files(), name: content})
    with pytest.raises(BadDataFile) as caught:
        load(directory)
    assert isinstance(caught.value, DataError)
    assert isinstance(caught.value, ValueError)
    for word in (str(directory / name), *words, "fetch it again"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda good: good[:-1], "cut short: 143 bytes of the 144"),
        (lambda good: good + b"\0", "continues after the 144 bytes"),
        (lambda good: good[:9], "ends inside its header"),
        (lambda good: b"", "begins with nothing"),
        (lambda good: b"\0\0\x0d\x03" + good[4:], "begins with 00 00 0d 03"),
        (lambda good: b"\0\0\x08\x02" + good[4:], "begins with 00 00 08 02"),
        (lambda good: b"<html>not found</html>", "not an IDX file"),
        (lambda good: good[:4] + b"\0\0\0\0" + good[8:], "promises nothing"),
        (lambda good: good[:4] + b"\xff" * 12 + good[16:], "more than the 1,073,741,824 allowed"),
        (lambda good: good[:4] + struct.pack(">3I", 1 << 20, 32, 32) + good[16:], "cut short"),
        (lambda good: small_files()[TRAIN_LABELS], "holds labels where images should be"),
        (lambda good: gzip.compress(good)[:-9], "gzip data is damaged"),
        (lambda good: gzip.compress(good)[:-8] + b"12345678", "gzip data is damaged"),
        (lambda good: gzip.compress(good)[:12] + b"\xff" * 40, "gzip data is damaged"),
        (lambda good: gzip.compress(good) + b"rest", "gzip data is damaged"),
        (lambda good: gzip.compress(good) + gzip.compress(b"more"), "continues after"),
        (lambda good: gzip.compress(good[:-1]), "cut short"),
    ],
)
def test_bad_images_are_refused(tmp_path: Path, change: object, words: str) -> None:
    assert callable(change)
    refuse(tmp_path, TRAIN_IMAGES, change(small_files()[TRAIN_IMAGES]), words)


def test_bad_labels_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, TRAIN_LABELS, idx(np.array([0] * 7 + [10] + [0] * 4)), "label 7 is 10", "0 to 9")
    refuse(tmp_path, TEST_LABELS, idx(np.zeros(5)), "5 labels for the 6 images", TEST_IMAGES)
    refuse(tmp_path, TEST_LABELS, small_files()[TEST_IMAGES], "holds images where labels should be", "swapped")


def test_test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path, TEST_IMAGES, idx(np.zeros((6, 3, 4))), "3 x 4 pixels", "4 x 3")


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zeros behind a header that promises 144 bytes: only one byte more than those is read."""
    asked: list[int] = []
    original = gzip.GzipFile.read

    def counting(stream: gzip.GzipFile, size: int = -1) -> bytes:
        asked.append(size)
        return original(stream, size)

    monkeypatch.setattr(gzip.GzipFile, "read", counting)
    bomb = gzip.compress(small_files()[TRAIN_IMAGES] + bytes(64 << 20), 1)
    refuse(tmp_path, TRAIN_IMAGES, bomb, "continues after the 144 bytes")
    assert min(asked) >= 0
    assert sum(asked) == 4 + 12 + 145


@pytest.mark.parametrize("where", ["nowhere", "file", "partial"])
def test_a_given_path_is_not_replaced_by_another(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, bare_machine: Path
) -> None:
    monkeypatch.setenv("MANYHANDS_DATA", str(write(tmp_path / "good", small_files())))
    (tmp_path / "file").write_text("")
    write(tmp_path / "partial", {name: content for name, content in small_files().items() if name != TEST_LABELS})
    reason = {"nowhere": "does not exist", "file": "is not a directory", "partial": f"lacks {TEST_LABELS} (plain"}
    with pytest.raises(DataNotFound, match="Give the directory with the four files") as caught:
        load(tmp_path / where)
    assert f"{tmp_path / where} {reason[where]}" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_read_idx_of_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(DataNotFound, match="no such file"):
            read_idx(path)


# --- where it is looked for


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: Path) -> None:
    debian = write(tmp_path / "debian", small_files(10))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIRECTORY", debian)
    assert load().source == f"{debian} (Debian's package dataset-fashion-mnist)"
    write(bare_machine, small_files(12))
    assert load().source == f"{bare_machine} (the user cache)"
    named = write(tmp_path / "named", small_files(14))
    monkeypatch.setenv("MANYHANDS_DATA", str(named))
    data = load()
    assert data.source == f"{named} ($MANYHANDS_DATA)"
    assert len(data.train.images) == 14
    assert len(load(debian).train.images) == 10


def test_a_named_place_without_data_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: Path
) -> None:
    write(bare_machine, small_files())
    monkeypatch.setenv("MANYHANDS_DATA", str(write(tmp_path / "half", {TRAIN_IMAGES: b""})))
    source = load().source
    assert source.startswith(f"{bare_machine} (the user cache)")
    assert f"not from $MANYHANDS_DATA ({tmp_path / 'half'}), which lacks {TRAIN_LABELS}" in source


def test_cache_follows_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / ".cache" / "manyhands" / "fashion-mnist", small_files())
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert load().source.endswith("(the user cache)")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert not load().subset


def test_damaged_data_is_an_error_not_a_fallback(bare_machine: Path) -> None:
    write(bare_machine, {**small_files(), TRAIN_LABELS: b"junk"})
    with pytest.raises(BadDataFile, match="Delete the file"):
        load()


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


@needs_full_set
def test_download_of_the_full_set(served: Path, bare_machine: Path) -> None:
    """The official files, made from Debian's by putting name and time back into their gzip headers."""
    for name, (md5, stamp) in OFFICIAL.items():
        debian = (DEBIAN_DIRECTORY / f"{name}.gz").read_bytes()
        official = debian[:3] + b"\x08" + struct.pack("<I", stamp) + debian[8:10] + name.encode() + b"\0" + debian[10:]
        assert hashlib.md5(official).hexdigest() == md5
        (served / f"{name}.gz").write_bytes(official)
    data = load()
    assert data.source == f"downloaded from {fashion_mnist.BASE_URL} to {bare_machine}"
    assert len(data.train.images) == 60_000
    assert not data.subset
    assert load(download=False).source == f"{bare_machine} (the user cache)"
    assert sorted(file.name for file in bare_machine.iterdir()) == sorted(f"{name}.gz" for name in OFFICIAL)


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


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("_LARGEST_DOWNLOAD", 10, "sends more than 10 bytes"), ("_SECONDS_PER_DOWNLOAD", -1.0, "took longer than")],
)
def test_a_download_without_end_is_stopped(
    served: Path, bare_machine: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, words: str
) -> None:
    serve_small(served, monkeypatch)
    monkeypatch.setattr(fashion_mnist, limit, value)
    assert words in load().source
    assert list(bare_machine.iterdir()) == []


def test_a_failed_download_says_so(served: Path, bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = load()
    assert missing.subset
    assert "the download failed: HTTP Error 404" in missing.source
    assert str(bare_machine) in missing.source
    monkeypatch.setattr(fashion_mnist, "BASE_URL", "http://127.0.0.1:9/")
    refused = load()
    assert refused.subset
    assert "Connection refused" in refused.source
    assert list(bare_machine.iterdir()) == []


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    data = load()
    assert data.subset
    assert "Not a directory" in data.source


def test_a_silent_server_is_not_waited_for(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(fashion_mnist, "BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setattr(fashion_mnist, "_TIMEOUT_SECONDS", 0.2)
        assert "timed out" in load().source


def test_two_processes_at_once(served: Path, bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = serve_small(served, monkeypatch)
    # Both wait at the end of the download of every file, so that their renames meet.
    code = f"""
import time
from pathlib import Path
from manyhands.training.data import fashion_mnist as module
module.BASE_URL, module.DIGESTS = {fashion_mnist.BASE_URL!r}, {digests!r}
module.DEBIAN_DIRECTORY = Path("/nonexistent")
pieces = module._pieces
def slowly(url):
    yield from pieces(url)
    time.sleep(0.3)
module._pieces = slowly
print("ready", flush=True)
input()
data = module.load()
print(data.subset, len(data.train.images), data.source)
"""
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert output.startswith("False 12 "), output
    assert sorted(file.name for file in bare_machine.iterdir()) == sorted(f"{name}.gz" for name in digests)

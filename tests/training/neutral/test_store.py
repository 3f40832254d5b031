"""Checkpoints: whole or not there, whatever happens to the writer, the disk and the files."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands import files
from manyhands.errors import CheckpointDamaged, CheckpointNotWritten, NotJson, WrongCheckpoint
from manyhands.training.checkpoints import store, tensors

STATE = {"epoch": 2, "cursor": 512, "lr": 0.1, "names": ["a", "ä"], "rng": {"key": 2**127, "on": True, "none": None}}
BLOBS = {"model": b"weights" * 100, "optimizer": b"", "rng.cpu": bytes(range(256))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def leave(folder: Path, role: str, *, step: int = 1) -> Path:
    """What a killed writer leaves behind."""
    path = folder / f".step-{step:08d}.{role}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"half")
    return path


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "checkpoints"
    path = store.save(folder, 123_456_789, STATE, BLOBS)
    assert path == folder / "step-123456789" == store.latest(folder)
    assert names(path) == ["model.safetensors", "optimizer.safetensors", "rng.cpu.safetensors", "state.json"]
    for place in (path, folder):
        found = store.load(place)
        assert found == store.Checkpoint(path=path, state=STATE, blobs=BLOBS, step=123_456_789)


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        store.save(tmp_path, step, {}, BLOBS, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_going_back_never_deletes_the_one_just_written(tmp_path: Path) -> None:
    store.save(tmp_path, 300, {}, BLOBS)
    store.save(tmp_path, 100, {}, BLOBS)
    store.save(tmp_path, 200, {}, BLOBS, keep=1)
    assert names(tmp_path) == ["step-00000200", "step-00000300"]
    store.drop_after(tmp_path, 200)
    assert names(tmp_path) == ["step-00000200"]


def test_a_step_is_replaced(tmp_path: Path) -> None:
    store.save(tmp_path, 5, {"try": 1}, {"old": b"1"})
    store.save(tmp_path, 5, {"try": 2}, {"new": b"2"})
    assert names(tmp_path) == ["step-00000005"]
    assert store.load(tmp_path).blobs == {"new": b"2"}


# State


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(st.text(), json_values, max_size=4))
def test_every_json_state_comes_back(tmp_path: Path, state: dict[str, Any]) -> None:
    store.save(tmp_path, 1, state, {})
    found = store.load(tmp_path).state
    assert found == state
    assert repr(found) == repr(state)  # 1 and 1.0 and True, 0.0 and -0.0, and the order of keys


@pytest.mark.parametrize(
    ("value", "lesson"),
    [
        (math.nan, "is nan"),
        ((1, 2), r"list\(value\)"),
        ({1: "a"}, "only strings for keys"),
        (b"raw", "is a bytes"),
        (signal.SIGKILL, "is a Signals"),
        pytest.param(10**5000, r"Write hex\(value\)", id="long"),
    ],
)
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, value: Any, lesson: str) -> None:
    with pytest.raises(NotJson, match=lesson) as caught:
        store.save(tmp_path, 1, {"optimizer": {"groups": [0, value]}}, {})
    assert "state['optimizer']['groups'][1]" in str(caught.value)
    assert names(tmp_path) == []


# Damage


def rewrite(change: Callable[[dict[str, Any]], None], *, signed: bool = False) -> Callable[[Path], None]:
    """An edit of state.json; a signed one has a digest that fits."""

    def edit(path: Path) -> None:
        content = json.loads((path / "state.json").read_text())
        change(content)
        if signed:
            content.pop("sha256")
            content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        (path / "state.json").write_text(json.dumps(content))

    return edit


def flip(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[10] ^= 1
    (path / "model.safetensors").write_bytes(data)


def to_fifo(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


def endless_state(path: Path) -> None:
    (path / "state.json").unlink()
    (path / "state.json").symlink_to("/dev/zero")


def text_of(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "state.json").write_text(text)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "blob missing": ("model.safetensors", lambda path: os.unlink(path / "model.safetensors")),
    "blob truncated": ("model.safetensors", lambda path: os.truncate(path / "model.safetensors", 50)),
    "blob edited": ("model.safetensors", flip),
    "blob a pipe": ("model.safetensors", to_fifo),
    "state missing": ("state.json", lambda path: os.unlink(path / "state.json")),
    "state truncated": ("state.json", lambda path: os.truncate(path / "state.json", 200)),
    "state not text": ("state.json", lambda path: (path / "state.json").write_bytes(b"\xff\xfe\xff")),
    "state a list": ("state.json", text_of("[1]")),
    "state nested": ("state.json", text_of("[" * 200_000)),
    "state endless": ("state.json", endless_state),
    "state edited": ("state.json", rewrite(lambda content: content["state"].update(cursor=513))),
    "state NaN": ("state.json", rewrite(lambda content: content["state"].update(lr=math.nan))),
    "no digest": ("state.json", rewrite(lambda content: content.pop("sha256"))),
    "newer format": ("state.json", rewrite(lambda content: content.update(format=2), signed=True)),
    "no blobs": ("state.json", rewrite(lambda content: content.pop("blobs"), signed=True)),
    "other step": ("state.json", rewrite(lambda content: content.update(step=8), signed=True)),
    "way out": (
        "state.json",
        rewrite(lambda content: content["blobs"].update({"../x": content["blobs"]["model"]}), signed=True),
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, kind: str) -> None:
    store.save(tmp_path, 3, STATE, BLOBS)
    path = store.save(tmp_path, 9, STATE, BLOBS)
    file, damage = DAMAGE[kind]
    damage(path)
    with pytest.raises(CheckpointDamaged) as caught:
        store.load(path)
    assert str(path / file) in str(caught.value)
    with pytest.warns(RuntimeWarning, match="Going on from step 3") as warned:
        assert store.load(tmp_path).step == 3
    assert str(path / file) in str(warned[0].message)
    assert warned[0].filename == __file__


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    path = store.save(tmp_path, 1, STATE, BLOBS)

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    for file in path.iterdir():
        file.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointDamaged):
        store.load(path)
    assert not (tmp_path / "sprung").exists()


# Leftovers


def test_leftovers_are_no_checkpoints_and_are_cleared_away(tmp_path: Path) -> None:
    for role in ("writing", "deleted"):
        leave(tmp_path, role, step=99)
    assert store.latest(tmp_path) is None
    store.save(tmp_path, 1, {}, BLOBS)
    assert names(tmp_path) == ["step-00000001"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".step-00000001").mkdir()
    (tmp_path / "step-00000009").write_text("a file, not a folder")
    store.save(tmp_path, 1, {}, BLOBS, keep=1)
    assert store.load(tmp_path).step == 1
    assert names(tmp_path) == [".step-00000001", "notes.txt", "step-00000001", "step-00000009"]


def test_death_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    path = store.save(tmp_path, 5, STATE, BLOBS)
    aside = leave(tmp_path, "replaced", step=5)
    shutil.rmtree(aside)
    path.rename(aside)
    assert store.latest(tmp_path) == aside
    assert store.load(tmp_path).step == 5
    store.save(tmp_path, 6, STATE, BLOBS)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


WRITER = """
import os, sys
from pathlib import Path
from manyhands.training.checkpoints import store as checkpoint

folder, same = Path(sys.argv[1]), sys.argv[2] == "same"
found = checkpoint.latest(folder)
step = checkpoint.load(folder).step if found else 0
print("ready", flush=True)
while True:
    step += 0 if same and step else 1
    blob = os.urandom(1000) * 300
    checkpoint.save(folder, step, {"first": blob[:8].hex()}, {"model": blob, "optimizer": blob[::-1]}, keep=2)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
@pytest.mark.parametrize("mode", ["next", "same"])
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)
    store.save(tmp_path, 1, {"first": "00"}, {"model": b"\0", "optimizer": b"\0"})
    highest, rounds = 1, 0
    while rounds < 25 or (mode == "next" and highest <= 10 and rounds < 250):  # a busy machine writes little
        rounds += 1
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), mode], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.002 * (rounds + 25)))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # not only one that is whole: the newest one
            found = store.load(tmp_path)
        assert found.step >= highest
        highest = found.step
        assert found.blobs["model"] == found.blobs["optimizer"][::-1]
        assert found.blobs["model"][:8].hex().startswith(found.state["first"])
    assert mode == "same" or highest > 10
    store.save(tmp_path, highest + 1, {}, {}, keep=2)
    assert names(tmp_path) == [f"step-{highest:08d}", f"step-{highest + 1:08d}"]


# A disk that refuses


@pytest.mark.parametrize("failing", ["write_new", "sync_folder", "rename"])
@pytest.mark.parametrize("step", [1, 2])
def test_whatever_call_fails_the_older_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, step: int
) -> None:
    store.save(tmp_path, 1, STATE, BLOBS)
    rename = os.rename

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail_into_place(source: Path, target: Path) -> None:
        if source.name.endswith(".writing") and (not target.exists() or step == 2):
            fail()
        rename(source, target)

    if failing == "rename":
        monkeypatch.setattr(os, "rename", fail_into_place)
    else:
        monkeypatch.setattr(files, failing, fail)
    with pytest.raises(CheckpointNotWritten, match="No space left"):
        store.save(tmp_path, step, {"new": True}, BLOBS)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert store.load(tmp_path).state == STATE


# Tensors as bytes: what comes back is what went in, and tensors of something else are refused by name


def test_there_and_back() -> None:
    given = {"a.weight": np.arange(6.0).reshape(2, 3).T, "count": np.int32(7), "none": np.zeros((0, 2), np.float32)}
    found = tensors.unpack(tensors.pack(given))
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (np.asarray(one).dtype, np.asarray(one).tolist()) for name, one in given.items()
    }
    assert tensors.unpack(tensors.pack({})) == {}


def test_kinds_that_numpy_does_not_know_are_widened() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    own = {"w": np.array([1.5, -0.1], ml_dtypes.bfloat16)}
    found = tensors.arrays_for(tensors.pack(own), own, "weights of another model")
    assert found["w"].dtype == ml_dtypes.bfloat16
    assert found["w"].tolist() == own["w"].tolist()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"w": np.zeros(3)}, "w is (3,), here it is (2,)"),
        ({"w": np.zeros(2), "v": np.zeros(1)}, "v is unknown here"),
        ({}, "w is missing"),
    ],
)
def test_tensors_of_something_else(saved: dict[str, object], said: str) -> None:
    with pytest.raises(WrongCheckpoint, match="these are weights of another model: ") as caught:
        tensors.arrays_for(tensors.pack(saved), {"w": np.zeros(2)}, "weights of another model")
    assert said in str(caught.value)


def test_bytes_that_are_no_tensors() -> None:
    with pytest.raises(CheckpointDamaged):
        tensors.unpack(b"nothing of the kind")

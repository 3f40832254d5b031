"""What all tests share: which framework this run is for."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, however busy the machine is: a run that fails fails again. New ones are looked for by
# pytest --hypothesis-profile=explore
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
COMPILING = ("jax", "tensorflow")  # each training of a test is traced and compiled: a second or two


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--framework", choices=FRAMEWORKS, help="run the contract suite against this framework")
    parser.addoption("--long", action="store_true", help="also run the tests that are marked long")


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C is an exception here and in every child; and JAX compiles each program once in a test run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background is started deaf to it
    beside_pytests = os.environ.get("PYTEST_DEBUG_TEMPROOT")  # the Makefile's, in memory
    folder = tempfile.TemporaryDirectory(prefix="manyhands-tests-jax-", dir=beside_pytests)
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder.name)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, and in the run with virtual devices those that would prove the same again."""
    if not config.getoption("--long"):
        kinds = ["long", *(["neutral"] if config.getoption("--framework") in COMPILING else [])]
        long = [item for item in items if any(map(item.get_closest_marker, kinds))]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    if os.environ.get("MANYHANDS_VIRTUAL_DEVICES"):
        skip = pytest.mark.skip(reason="once is enough: this process's devices do not matter")
        for item in items:
            if item.get_closest_marker("once"):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def no_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write what the user's own programs remember."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANYHANDS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_finish() -> None:
    """pytest listens to loggers that hand nothing on; to a listener PyTorch describes all that it compiles."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def no_trace_of_compilers() -> None:
    """As above, where a test was the first to import PyTorch."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings in a run's folder draw their curves; hundreds of tests need none, those of the mark do."""
    if request.node.get_closest_marker("pictures") is None and importlib.util.find_spec("numpy"):
        from manyhands.training.callbacks.display import Picture

        monkeypatch.setattr(Picture, "on_fit_end", lambda *_: None)


@pytest.fixture(scope="session")
def framework(request: pytest.FixtureRequest) -> str:
    """The name of the framework under test: the one asked for, or the first that is installed."""
    asked = request.config.getoption("--framework")
    found = asked or next((name for name in FRAMEWORKS if importlib.util.find_spec(name)), None)
    if found is None:
        pytest.skip("no framework is installed here")
    return found


@pytest.fixture(scope="session")
def mh(framework: str) -> ModuleType:
    """The module of the framework under test."""
    return importlib.import_module(f"manyhands.{framework}")


@pytest.fixture
def two(request: pytest.FixtureRequest) -> list[Any]:
    """Two devices of the test file's framework, or of the one under test; skipped where there is only one."""
    mh: Any = vars(request.module).get("mh") or request.getfixturevalue("mh")
    if mh.num_gpus() < 2:
        pytest.skip("needs two devices: MANYHANDS_VIRTUAL_DEVICES=3")
    return [mh.gpu(0), mh.gpu(1)]

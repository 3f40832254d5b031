"""What all tests share: which framework this run is for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--framework", choices=FRAMEWORKS, help="run the contract suite against this framework")


@pytest.fixture(scope="session", autouse=True)
def no_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write what the user's own programs remember."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANYHANDS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
    """The door of the framework under test."""
    return importlib.import_module(f"manyhands.{framework}")

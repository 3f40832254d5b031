"""Make the virtual environment of one framework: ``python requirements/install.py jax .venvs/jax``.

Versions come from ``requirements/<framework>.txt``. ``docs`` is the environment of the site and of the package: it has
no framework. Two things depend on the processor: TensorFlow's small
CPU build exists for x86 only, and MXNet's build for Arm asks for Arm's Performance Libraries, which
no package carries. What MXNet takes from them are BLAS and LAPACK, so OpenBLAS, as SciPy's package
carries it, serves under their names.

The pip that Python brings reads the pages of an index at half the speed of a new one, so that comes first. And of the
thousands of modules that are installed a process imports a few: Python compiles these when they are first imported,
here and later, and pip compiles none.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRA = {
    "torch": ["ipykernel", "mypy", "nbclient", "nbformat", "ruff", "tensorboardX", "torchmetrics"],
    "docs": ["mkdocs-material", "mkdocstrings[python]", "ruff", "setuptools", "build", "twine"],
}
ON_ARM = platform.machine() in ("aarch64", "arm64")


def main(framework: str, folder: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    extras = [framework]  # not "gpu": of it only what runs without one
    wanted = ["nvidia-ml-py", "pytest", "hypothesis", "safetensors", "filelock", "matplotlib"]
    if framework == "docs":
        extras, wanted = [], ["pytest", "hypothesis", "filelock"]
    wanted += EXTRA.get(framework, [])
    if framework == "tensorflow" and not ON_ARM:
        extras.remove(framework)
        wanted.append("tensorflow-cpu")
    if framework == "mxnet" and ON_ARM:
        wanted.append("scipy")
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["-c", ROOT / "requirements" / f"{framework}.txt"]
    subprocess.run([*pip, "--upgrade", "pip", "setuptools"], check=True)
    package = f"{ROOT}[{','.join(extras)}]" if extras else ROOT
    subprocess.run([*pip, "--no-build-isolation", "-e", package, *wanted], check=True)
    if framework == "mxnet" and ON_ARM:
        stand_in_for_arm_libraries(folder)
    if framework != "docs":
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "OPENBLAS_NUM_THREADS": "1"}
        subprocess.run([python, "-c", f"import {framework}, pytest"], check=True, env=environment)


def stand_in_for_arm_libraries(folder: Path) -> None:
    """Lay OpenBLAS beside ``libmxnet.so`` under the three names that it asks for."""
    packages = next((folder / "lib").glob("python3*/site-packages"))
    (openblas,) = (packages / "scipy.libs").glob("libopenblas*.so")
    for name in ("libarmpl_lp64_mp.so", "libamath.so", "libastring.so"):
        (packages / "mxnet" / name).symlink_to(Path("..") / "scipy.libs" / openblas.name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

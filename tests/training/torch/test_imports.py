"""What importing the trainer loads: little, because most jobs need few of the features."""

from __future__ import annotations

import subprocess
import sys

MOST = 90  # of our files
# Of a capture, of sharded models and of ranks in worker processes.
LATE = ("manyhands.training.torch.fast.", "manyhands.training.torch.ranks.sharding", "manyhands.training.torch.learner")


def test_the_trainer_loads_few_files() -> None:
    code = "import sys, manyhands.torch as mh; mh.Trainer; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in result.stdout.split() if name.split(".")[0] == "manyhands"]
    assert len(loaded) <= MOST, "\n".join(sorted(loaded))
    assert not [name for name in loaded if name.startswith(LATE)]

"""Steps as the book writes them: they plot their metrics, and a validation step returns nothing."""

from __future__ import annotations

from typing import Any

import pytest
from training_bench import Bench

from manyhands.errors import BadSettings


@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_validation_step_plots_are_the_figures_of_the_epoch(bench: Bench, devices: int) -> None:
    class Plotting(bench.mh.Module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            self.plot("loss", loss, train=True)
            return loss

        def validation_step(self, batch: Any) -> None:
            scores = self(*batch[:-1])
            self.plot("loss", self.loss(scores, batch[-1]), train=False)
            self.plot("acc", bench.own.share_right(scores, batch[-1]), train=False)

    how: dict[str, Any] = {"quiet": True, "precision": "fp32", **bench.on(devices)}
    stop = bench.mh.EarlyStopping("val_acc", patience=9, mode="max")
    row = bench.mh.Trainer(1, callbacks=[stop], **how).fit(bench.with_net(Plotting()), bench.data()).rows[-1]
    plain = bench.mh.Trainer(1, **how).fit(bench.with_net(bench.mh.Module()), bench.data()).rows[-1]
    for name in ("train_loss", "val_loss", "val_acc"):
        assert row[name] == pytest.approx(plain[name], rel=1e-5), name


def test_a_step_with_other_arguments_is_refused_by_name(bench: Bench) -> None:
    if bench.framework == "torch":
        pytest.skip("PyTorch's steps may take the number of the batch, and that of the optimizer")

    class OfTheBook(bench.mh.Module):  # type: ignore[misc, name-defined]
        def training_step(self, params: Any, batch: Any, state: Any) -> Any:
            return state.apply_fn(params, *batch)

    how: dict[str, Any] = {"quiet": True, **bench.on(1)}
    with pytest.raises(BadSettings, match=r"takes \(params, batch, state\).*def training_step\(self, batch\)"):
        bench.mh.Trainer(1, **how).fit(bench.with_net(OfTheBook()), bench.data())

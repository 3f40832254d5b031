"""A GAN: two optimizers, each with its own loss, exact on two ranks and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training_cases import difference, fit, mlp, rows, vectors

import manyhands.torch as mh
from manyhands.errors import BadSettings, WrongCheckpoint
from manyhands.training.data.order import epoch_order
from manyhands.training.options import Limits, Step
from manyhands.training.torch.trainer import Trainer

CLOSE = 1e-12


class GAN(nn.Module):
    """The noise is a part of the data, so that one device and two have the same."""

    def __init__(self, *, as_list: bool = False) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.as_list = as_list

    def configure_optimizers(self) -> Any:
        critic = torch.optim.Adam(self.critic.parameters(), lr=0.02)
        generator = torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9)
        return [critic, generator] if self.as_list else {"critic": critic, "generator": {"optimizer": generator}}

    def training_step(self, batch: Any, optimizers: Any) -> None:
        X, noise, y = batch
        real, generated = self.critic(X), self.critic(self.generator(noise))
        loss = functional.softplus(-real).mean() + functional.softplus(generated).mean()
        optimizers[0 if self.as_list else "critic"].minimize(loss)
        losses = functional.softplus(-self.critic(self.generator(noise)))
        optimizers[1 if self.as_list else "generator"].minimize(mh.LossSum(losses.sum(), len(y)))


def data() -> tuple[torch.Tensor, ...]:
    X, y = vectors()
    return X, torch.randn(len(X), 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64), y


def fit_gan(model: nn.Module, samples: Any, ranks: int, **options: Any) -> Any:
    return fit(model, samples, ranks, lr=None, **options)


def by_hand(model: GAN, order: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same training without the trainer."""
    critic, generator = GAN.configure_optimizers(model)
    for samples in order:
        X, noise = (part[samples] for part in data()[:2])
        critic.zero_grad()
        loss = functional.softplus(-model.critic(X)).mean()
        (loss + functional.softplus(model.critic(model.generator(noise).detach())).mean()).backward()
        critic.step()
        generator.zero_grad()
        functional.softplus(-model.critic(model.generator(noise))).mean().backward()
        generator.step()
    return model.state_dict()


@pytest.mark.parametrize("as_list", [True, False])
def test_it_is_the_loop_written_by_hand(as_list: bool) -> None:
    numbers = torch.from_numpy(epoch_order(0, 0, 90))
    model = GAN(as_list=as_list)
    result = Trainer(1, batch_size=30, quiet=True).fit(model, data())
    assert difference(by_hand(GAN(as_list=True), list(numbers.split(30))), model.state_dict()) <= CLOSE
    assert result.rows[-1]["samples"] == 90


def test_a_resumed_job_ends_with_the_same_bits(tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch_size": 30, "quiet": True, "schedule": lambda done: 1 - done / 2}
    whole = GAN()
    Trainer(3, **how).fit(whole, data())
    stopped = GAN()
    Trainer(2, run=tmp_path / "run", **(how | {"schedule": lambda done: 1 - done / 3})).fit(stopped, data())
    resumed = GAN()
    Trainer(3, run=tmp_path / "run", resume="auto", **how).fit(resumed, data())
    assert difference(whole.state_dict(), resumed.state_dict()) == 0


class Twins(nn.Module):
    """Two nets of the same shape, each with an optimizer and a loss of its own."""

    def __init__(self, *order: str, as_list: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.nets = nn.ModuleDict({name: nn.Linear(6, 1).double() for name in ("first", "second", "third")})
        self.order, self.as_list = order, as_list

    def configure_optimizers(self) -> Any:
        rates = {"first": 0.1, "second": 0.01, "third": 0.3}
        made = {name: torch.optim.Adam(self.nets[name].parameters(), lr=rates[name]) for name in self.order}
        return list(made.values()) if self.as_list else made

    def training_step(self, batch: Any, optimizers: Any) -> None:
        for number, name in enumerate(self.order):
            output: torch.Tensor = self.nets[name](batch[0])
            loss = (output - (1 if name == "first" else -3)).square().mean()
            optimizers[number if self.as_list else name].minimize(loss)


def test_states_are_restored_by_name(tmp_path: Path) -> None:
    """In another order, two optimizers of the same kind and shape would take each other's state."""
    how: dict[str, Any] = {"batch_size": 30, "quiet": True}
    whole = Twins("first", "second")
    Trainer(2, **how).fit(whole, data())
    Trainer(1, run=tmp_path / "run", **how).fit(Twins("first", "second"), data())
    turned = Twins("second", "first")
    result = Trainer(2, run=tmp_path / "run", resume="auto", **how).fit(turned, data())
    assert difference(whole.state_dict(), turned.state_dict()) == 0
    assert not any("resumed with" in note and "lr" in note for note in result.notes)

    again: dict[str, Any] = {"resume": tmp_path / "run", **how}
    for order in (["first"], ["first", "third"], ["first", "second", "third"]):
        with pytest.raises(WrongCheckpoint, match=r"the optimizer first: Adam, second: Adam, this job has first: Adam"):
            Trainer(3, **again).fit(Twins(*order), data())
    Trainer(1, run=tmp_path / "list", **how).fit(Twins("first", "second", as_list=True), data())
    with pytest.raises(WrongCheckpoint, match=r"'0' has other parameters than in the checkpoint: nets.second.weight "):
        Trainer(2, **(again | {"resume": tmp_path / "list"})).fit(Twins("second", "first", as_list=True), data())


def test_what_cannot_be() -> None:
    class Plain(GAN):
        def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
            return functional.softplus(self.critic(batch[0])).mean()

    with pytest.raises(BadSettings, match=r"gave 2 optimizers: .* calls optimizers\[name\]\.minimize\(loss\)"):
        fit_gan(Plain(), data(), 1)
    with pytest.raises(BadSettings, match=r"data to test with: give it a validation_step\(self, batch\)"):
        fit_gan(GAN(), (data(), data()), 1)
    with pytest.raises(BadSettings, match="with several optimizers, each of which"):
        fit_gan(GAN(), data(), 1, step=Step(on_nan="continue"))
    model = GAN()
    model.configure_optimizers = lambda: [torch.optim.SGD(model.parameters(), 0.1)] * 2  # type: ignore[method-assign]
    with pytest.raises(BadSettings, match="optimizer 1 of configure_optimizers shares parameters with another one"):
        fit_gan(model, data(), 1)
    model.configure_optimizers = lambda: [mlp()]  # type: ignore[method-assign]
    with pytest.raises(BadSettings, match="gave a Sequential among its optimizers: give a list of optimizers, or a di"):
        fit_gan(model, data(), 1)
    model.configure_optimizers = lambda: {"a": {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "every": 2}}  # type: ignore[method-assign]
    with pytest.raises(BadSettings, match="gave 'every' beside an optimizer: call minimize in those batches only"):
        fit_gan(model, data(), 1)


class Twice(nn.Module):
    """One optimizer that makes two updates of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(6, 1).double()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, optimizers: Any) -> None:
        for target in (1.0, -1.0):
            optimizers[0].minimize((self.net(batch[0]) - target).square().mean())


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_several_updates_of_a_batch_see_the_weights_of_those_before(precision: Any) -> None:
    """Also where autocast keeps its casts of weights: they have changed when the second loss is computed."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    X, trained, by_hand = data()[0].to(dtype), Twice().to(dtype), Twice().to(dtype)
    mh.Trainer(max_epochs=1, devices="cpu", batch_size=30, precision=precision, quiet=True).fit(trained, (X,))
    optimizer = by_hand.configure_optimizers()
    for samples in torch.from_numpy(epoch_order(0, 0, 90)).split(30):
        for target in (1.0, -1.0):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = (by_hand.net(X[samples]) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    close = CLOSE if precision == "fp64" else 1e-6
    torch.testing.assert_close(trained.state_dict(), by_hand.state_dict(), rtol=close, atol=close)


def test_its_updates_are_those_of_one_device_on_two_ranks() -> None:
    """The last batch has one sample, so that one rank has none."""
    samples = tuple(part[:61] for part in data())
    how: dict[str, Any] = {"batch_size": 30, "gradient_clip_val": 0.3}
    alone, metrics = fit_gan(GAN(), samples, 1, **how)
    together, shared = fit_gan(GAN(), samples, 2, **how, step=Step(shares=[0.6, 0.4]))
    assert difference(alone, together) <= CLOSE
    assert [row["train_loss"] for row in rows(metrics)] == pytest.approx([row["train_loss"] for row in rows(shared)])


def test_a_rank_without_samples_of_the_first_batch_after_a_resume(tmp_path: Path) -> None:
    """The job stops before its last batch, which has one sample: the second rank has none to take part with."""
    samples = tuple(part[:61] for part in data())
    alone, _ = fit_gan(GAN(), samples, 1, batch_size=30, max_epochs=1)
    for steps in (2, 3):
        run = {"run": tmp_path / "run", "resume": "auto", "limits": Limits(max_steps=steps)}
        resumed, _ = fit_gan(GAN(), samples, 2, batch_size=30, max_epochs=1, **run)
    assert difference(alone, resumed) <= CLOSE


def test_what_updates_cannot_be() -> None:
    class Wrong(GAN):
        def training_step(self, batch: Any, optimizers: Any) -> None:
            optimizers["critic"].minimize(3.0)

    with pytest.raises(BadSettings, match=r"optimizers\['critic'\].minimize\(float\): give the loss, a tensor of one"):
        fit_gan(Wrong(), data(), 1)
    with pytest.raises(BadSettings, match=r"Step\(accumulate=...\) with several optimizers, each of which"):
        fit_gan(GAN(), data(), 1, step=Step(accumulate=2))
    with pytest.raises(BadSettings, match=r"Step\(batch_stats='global'\) with training_step\(batch, optimizers\)"):
        fit_gan(GAN(), data(), 2, step=Step(batch_stats="global"))
    with pytest.raises(BadSettings, match="makes updates and has no loss to show"):
        Trainer(1, quiet=True).evaluate(GAN(), data())

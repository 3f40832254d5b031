"""Side lanes on a real GPU: the same gradients and the same weights, to the bit, as the step on one lane.

A compiled step with side lanes is another graph for Inductor than one without: it fuses other operations and rounds at
other places, so equal bits are not promised there. Its gradients are to be as exact as those of the plain step.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from exact import float64  # noqa: E402
from training_gpu_cases import captured, samples  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.book import torch as models  # noqa: E402
from manyhands.training.options import Step  # noqa: E402
from manyhands.training.torch.fast import build  # noqa: E402
from manyhands.training.torch.fast.lanes.eager import StepLanes, StreamLanes  # noqa: E402

pytestmark = pytest.mark.usefixtures("same_kernels")
DEVICE = "cuda:0"
IMAGES, LABELS = samples(320, 28, 10)
NETS = {"lenet": models.lenet, "small resnet": models.small_resnet, "resnet-18": models.resnet18}


def trained(name: str, *, epochs: int = 2, lanes: bool = True, **options: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    net = models.initialise(NETS[name](), seed=0)
    settings = {"devices": ["gpu:0"], "lr": 0.05, "quiet": True, "batch_size": 32, **options}
    trainer = mh.Trainer(epochs, **{name: value for name, value in settings.items() if value is not None})
    with nullcontext() if lanes else build.without("side lanes"):
        result = trainer.fit(net, (IMAGES, LABELS))
    return net.state_dict(), result


def unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_twenty_steps_end_in_the_same_weights(name: str, compiled: bool) -> None:
    """To the bit; of a compiled step only that it trains: its gradients are looked at below."""
    step = Step(optimize="max" if compiled else "auto")
    plain, told = trained(name, lanes=False, step=step)
    lanes, told_too = trained(name, step=step)
    assert captured(told), told.notes
    assert told.notes == told_too.notes
    if compiled:
        assert all(bool(value.isfinite().all()) for value in lanes.values())
    else:
        assert not unequal(plain, lanes)


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_a_compiled_step_are_as_exact(name: str) -> None:
    net = models.initialise(NETS[name](), seed=0).to(DEVICE, memory_format=torch.channels_last)
    wide = copy.deepcopy(net).double()
    x, y = IMAGES[:64].to(DEVICE), LABELS[:64].to(DEVICE)
    stream = torch.cuda.Stream()
    step_lanes = StepLanes.on_streams(torch.device(DEVICE), stream)

    def loss() -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = net(x)
        return torch.nn.functional.cross_entropy(output.float(), y)

    def gradients(model: Any) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    torch.nn.functional.cross_entropy(wide(x.double()), y).backward()
    loss().backward()
    exactly, plain = gradients(wide), gradients(net)
    for lanes in (False, True):
        torch._dynamo.reset()
        options = {"post_grad_custom_post_pass": step_lanes.inductor_pass()} if lanes else None
        forward = torch.compile(loss, dynamic=False, options=options)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2):
                net.zero_grad(set_to_none=True)
                found = forward()
                with step_lanes.during_backward(64, compiled=True) if lanes else nullcontext():
                    found.backward()
        verdict = float64.verdict(gradients(net), plain, exactly, torch.finfo(torch.bfloat16).eps)
        assert verdict.accepted, f"lanes: {lanes}; {verdict.words}"


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"precision": "fp32"}, {"schedule": mh.one_cycle}])
def test_other_settings_too(options: dict[str, Any]) -> None:
    assert not unequal(
        trained("small resnet", lanes=False, **options)[0],
        trained("small resnet", **options)[0],
    )


@pytest.mark.parametrize("max_held", [None, 1 << 20])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_every_gradient_is_the_same(name: str, captured: bool, max_held: int | None) -> None:
    net = models.initialise(NETS[name](), seed=0).to(DEVICE, memory_format=torch.channels_last)
    x, y = IMAGES[:64].to(DEVICE), LABELS[:64].to(DEVICE)
    parameters = list(net.parameters())
    state = {key: value.clone() for key, value in net.state_dict().items()}
    stream = torch.cuda.Stream()
    step_lanes = StepLanes(StreamLanes(torch.device(DEVICE), 2, stream), "gpu:0", max_held=max_held)

    def backward(lanes: bool) -> None:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(x).float(), y)
        if not lanes:
            loss.backward()
            return
        with step_lanes.during_backward(64, compiled=False):
            loss.backward()

    def gradients(lanes: bool) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2):
                net.load_state_dict(state)
                backward(lanes)
            if captured:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    backward(lanes)
                for _ in range(10):
                    net.load_state_dict(state)
                    graph.replay()
        torch.cuda.synchronize()
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    plain, lanes = gradients(False), gradients(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, lanes, strict=True))
    assert "in parallel with the backward pass" in "\n".join(step_lanes.explain(64))


@pytest.mark.parametrize("side_lanes", [False, True])
def test_the_run_folder_tells_the_step(tmp_path: Path, side_lanes: bool) -> None:
    trained("lenet", lanes=side_lanes, run=tmp_path / "run")
    words = (tmp_path / "run" / "step.txt").read_text()
    assert "32 samples: in a CUDA graph, kernels not compiled" in words
    assert ("x convolution, weight" in words) == side_lanes
    assert "x product, weight" not in words  # so small ones are not worth the memory that cuBLAS takes for a lane
    assert ("all on one lane" in words) != side_lanes

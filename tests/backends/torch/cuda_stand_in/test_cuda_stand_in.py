"""``torch.cuda`` while virtual devices stand in for GPUs: what it answers, and that nothing of it stays."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_python
from torch import nn

from manyhands import cli
from manyhands import torch as mh
from manyhands.backends.torch import virtual
from manyhands.errors import VirtualDevicesError

PAGE = Path(__file__).parents[4] / "docs" / "virtual-devices.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)

# Beginning and end

NAMESPACES = (
    torch,
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.accelerator,
    torch.nn.parallel.comm,
    torch.autocast,
    torch.utils,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.UninitializedParameter,
    torch.nn.UninitializedBuffer,
    threading.Thread,
)


def test_all_is_put_back_exactly() -> None:
    import torch.cuda.comm

    before = [dict(vars(one)) for one in NAMESPACES]
    with mh.virtual_devices(2, as_cuda=True):
        assert torch.cuda.device_count() == 2
        changed = [
            name
            for one, was in zip(NAMESPACES, before, strict=True)
            for name in was
            if vars(one)[name] is not was[name]
        ]
        assert len(changed) > 50
    for one, was in zip(NAMESPACES, before, strict=True):
        now = dict(vars(one))
        assert now.keys() == was.keys()
        assert [name for name in was if now[name] is not was[name]] == []
    assert virtual.only_hooks()
    assert virtual.count() == 0
    assert not virtual.instead


def test_it_ends_after_an_error_and_begins_again() -> None:
    was = torch.cuda.is_available
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no device cuda:5"), mh.virtual_devices(2, as_cuda=True):
            torch.cuda.set_device(5)
        assert torch.cuda.is_available is was
    with mh.virtual_devices(3, as_cuda=True) as devices:
        torch.cuda.set_device(1)
        assert len(devices) == torch.cuda.device_count() == 3
    with mh.virtual_devices(2, as_cuda=True):
        assert torch.cuda.current_device() == 0


def test_blocks_are_nested_and_the_outer_one_counts() -> None:
    with mh.virtual_devices(2, as_cuda=True) as devices:
        with mh.virtual_devices(2) as inner:
            assert inner == devices == mh.virtual_devices(2)
        x = torch.ones(1).cuda(1)
        with pytest.raises(VirtualDevicesError, match="leave the with block"):
            mh.virtual_devices(3)
    assert mh.num_gpus() == torch.cuda.device_count()
    assert str(x.device) == "cpu:1"  # it is still there, under the dispatcher's name
    assert (x + x).tolist() == [2.0]
    with pytest.raises(VirtualDevicesError, match="are gone"), inner:
        pass


def test_a_process_with_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    count = torch.cuda.device_count
    with mh.virtual_devices(2) as devices:
        assert [str(device) for device in devices] == ["cpu:0", "cpu:1"]
        assert torch.cuda.device_count is count
        x = torch.ones(2, device="cpu:1")
        assert (str(x.device), x.is_cuda, x.is_cpu) == ("cpu:1", False, True)


def test_the_names_can_be_left_alone() -> None:
    count = torch.cuda.device_count
    with mh.virtual_devices(2, as_cuda=False):
        assert torch.cuda.device_count is count
        assert mh.gpu(1) == torch.device("cpu:1")
        layer = nn.LazyLinear(2).to(mh.gpu(1))
        assert layer(torch.ones(1, 3, device=mh.gpu(1))).device == mh.gpu(1)


def test_the_environment_asks_for_it() -> None:
    """And the first operation loads no compiler, which would take seconds."""
    code = (
        "import sys, torch; had = 'torch._dynamo' in sys.modules; from manyhands import torch as mh; "
        "print(torch.ones(1).cuda(1) + 0, torch.cuda.device_count(), ('torch._dynamo' in sys.modules) == had)"
    )
    result = run_python(code, MANYHANDS_VIRTUAL_DEVICES="2", CUDA_VISIBLE_DEVICES="")
    assert result.stdout == "tensor([1.], device='cuda:1') 2 True\n", result.stderr


# Names


@pytest.mark.usefixtures("two_gpus")
def test_every_way_to_name_a_device() -> None:
    one = torch.device("cuda:1")
    x = torch.ones(2)
    made = [
        x.cuda(1),
        x.cuda("cuda:1"),
        x.cuda(device=one, non_blocking=True),
        x.to(1),
        x.to("cuda:1", torch.float64),
        x.to(device="cuda:1", dtype=torch.half, copy=True),
        x.to(torch.zeros(1, device=one)),
        torch.zeros(2, device=1),
        torch.tensor([1.0], device="cuda:1"),
        torch.as_tensor([1.0], device="cpu:1"),
        torch.arange(3, device=one),
        torch.zeros_like(x.cuda(1)),
        torch.full_like(x, 2.0, device=one),
        x.new_zeros(2, device="cuda:1"),
        x.cuda().new_tensor([1.0], device=one),
        torch.randn(2, device=one, generator=torch.Generator(device=one).manual_seed(1)),
        nn.Linear(2, 2, device="cuda:1").weight,
        nn.Linear(2, 2).to_empty(device=one).weight,
        x.to(torch.device(1)),
        x.to(torch.device(device=1)),
        x.to(torch.device("cuda", index=1)),
        x.to(torch.device(type="cuda", index=1)),
        nn.Linear(2, 2).to(1).weight,
        nn.Linear(2, 2).to(device=1, dtype=torch.float64).weight,
        x.cuda(1).type("torch.cuda.DoubleTensor") if torch.cuda.set_device(1) is None else x,
        torch.zeros(2, device="cuda"),
        x.cuda(),
    ]
    assert [str(tensor.device) for tensor in made] == ["cuda:1"] * len(made)
    there = made[0]
    assert there.cuda(1) is there.to("cuda:1") is mh.to(there, mh.gpu(1)) is there  # nothing is copied
    assert (there.is_cuda, there.cpu().is_cuda, there.get_device()) == (True, False, 1)
    assert made[0].type() == "torch.cuda.FloatTensor"
    assert made[0].type("torch.FloatTensor").device.type == "cpu"
    torch.cuda.set_device(0)
    with torch.cuda.device(1):
        assert (torch.cuda.current_device(), x.cuda().get_device()) == (1, 1)
    with torch.cuda.device_of(made[0]):
        assert torch.cuda.current_device() == 1
    with torch.device("cuda:1"):
        assert torch.ones(1).device == torch.tensor(1.0).device == nn.LazyLinear(1).weight.device == one
    torch.set_default_device("cuda")
    assert torch.ones(1).device == torch.get_default_device() == torch.device("cuda:0")
    torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"
    with pytest.raises(RuntimeError, match="no virtual device cuda:7"):
        x.cuda(7)
    with pytest.raises(ValueError, match="must be cuda device"):
        x.cuda("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_who_asks_for_the_truth_gets_it() -> None:
    assert "virtual device 1 (CPU" in torch.cuda.get_device_name(1)
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.get_device_properties("cuda:1").name == torch.cuda.get_device_name(1)
    assert str(mh.devices()[2].device) == "virtual:1"
    with pytest.raises(RuntimeError, match="no device cuda:2"):
        torch.cuda.get_device_name(2)
    with pytest.raises(RuntimeError, match="have no CUDA graphs"):
        torch.cuda.CUDAGraph()


@pytest.mark.usefixtures("two_gpus")
def test_threads_started_later_know_the_devices() -> None:
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda i: torch.ones(2, device=f"cuda:{i}") + torch.ones(2).cuda(i), [0, 1]))
    assert [one.get_device() for one in made] == [0, 1]
    with mh.parallel():
        assert mh.task(lambda: torch.ones(1).cuda(1))().result().get_device() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there CUDA itself answers")
def test_a_thread_started_before_is_told_why() -> None:
    go, errors = threading.Event(), []

    def work() -> None:
        go.wait(60)
        try:
            torch.ones(2, device="cuda:1")
        except RuntimeError as error:  # NotImplementedError, where PyTorch has asked for CUDA before
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    with mh.virtual_devices(2, as_cuda=True):
        go.set()
        thread.join()
    assert "started before the virtual devices were made" in errors[0] or "'CUDA' backend" in errors[0]


# Memory, streams, random numbers, files


@pytest.mark.usefixtures("two_gpus")
def test_memory_is_that_of_live_tensors() -> None:
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(1)
    x = torch.zeros(1000, device="cuda:1")
    view = x[:10]
    assert torch.cuda.memory_allocated(1) == torch.cuda.memory_reserved("cuda:1") == before + 4000
    del x, view
    assert torch.cuda.memory_allocated(1) == before
    assert torch.cuda.max_memory_allocated(1) == before + 4000
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    assert "bytes" in torch.cuda.memory_summary()


@pytest.mark.usefixtures("two_gpus")
def test_streams_and_events_have_nothing_to_wait_for() -> None:
    stream = torch.cuda.Stream(device="cuda:1")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.cuda.stream(stream):
        assert (torch.cuda.current_stream(), torch.cuda.current_device()) == (stream, 1)
        x = torch.ones(2, device="cuda")
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1) != stream
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream(1))
    end.record(stream)
    end.synchronize()
    assert (x.get_device(), end.query(), stream.query(), torch.cuda.current_device()) == (1, True, True, 0)
    assert begin.elapsed_time(end) > 0
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


@pytest.mark.usefixtures("two_gpus")
def test_seeds_and_states_are_the_hosts() -> None:
    torch.manual_seed(3)
    x = torch.randn(3, device="cuda:1")
    torch.cuda.manual_seed_all(3)
    state = torch.cuda.get_rng_state(1)
    assert torch.equal(torch.randn(3, device="cuda:1"), x)
    torch.cuda.set_rng_state(state, "cuda:1")
    assert torch.equal(torch.randn(3), x.cpu())
    assert isinstance(torch.Generator("cuda"), torch.Generator)


@pytest.mark.usefixtures("two_gpus")
def test_numbers_on_a_device_are_read_into_new_tensors() -> None:
    half = torch.tensor(1.5, device="cuda:1", dtype=torch.float16)
    assert torch.equal(torch.tensor([half]), torch.tensor([1.5], dtype=torch.float16))
    assert torch.tensor([[half, 2], (3, half)], device="cuda").tolist() == [[1.5, 2.0], [3.0, 1.5]]
    assert half.new_tensor([half]).device == torch.device("cuda:1")
    assert torch.zeros(2).fill_(half).tolist() == [1.5, 1.5]
    x = torch.tensor([1.5, 2.0], device="cuda:1")
    assert torch.FloatTensor([x[0], 3.0]).tolist() == [1.5, 3.0]
    assert torch.Tensor([[x[0]], [x[1]]]).tolist() == [[1.5], [2.0]]
    assert torch.LongTensor([x[1].long()]).tolist() == [2]
    assert [10, 20, 30][x[1].long()] == 30
    with pytest.raises(TypeError, match="only integer tensors"):
        [10, 20, 30][x[0]]
    with pytest.raises((ValueError, RuntimeError), match=r"to (Python scalars|Scalar)"):  # PyTorch's own
        float(x)


@pytest.mark.usefixtures("two_gpus")
def test_files_hold_tensors_of_the_host(tmp_path: Any) -> None:
    layer = nn.Linear(2, 2).cuda(1)
    torch.save({"net": layer.state_dict(), "x": torch.ones(2, device="cuda:0"), "epoch": 3}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["x"].device.type == "cpu"
    there = torch.load(tmp_path / "a.pt", map_location="cuda:1", weights_only=True)
    assert (there["x"].get_device(), there["epoch"]) == (1, 3)
    other = nn.Linear(2, 2).cuda()
    other.load_state_dict(there["net"])
    assert torch.equal(other.weight.cpu(), layer.weight.cpu())
    torch.save(layer, tmp_path / "net.pt")
    assert torch.load(tmp_path / "net.pt", map_location="cuda:0", weights_only=False).weight.get_device() == 0


@pytest.mark.usefixtures("two_gpus")
def test_collectives_by_hand() -> None:
    x = torch.arange(6.0, device="cuda:0").reshape(3, 2)
    assert [one.get_device() for one in torch.cuda.comm.broadcast(x, [0, 1])] == [0, 1]
    assert torch.cuda.comm.reduce_add([x, x.cuda(1)], destination=1).tolist() == (2 * x).tolist()
    parts = torch.cuda.comm.scatter(x, [0, 1], chunk_sizes=[1, 2])
    assert [len(part) for part in parts] == [1, 2]
    assert torch.cuda.comm.gather(parts, destination=1).get_device() == 1
    assert torch.cuda.comm.gather(parts, destination=-1).device.type == "cpu"
    out = [torch.zeros(1, 2).cuda(0), torch.zeros(2, 2).cuda(1)]
    torch.cuda.comm.scatter(x, out=out)
    assert out[1].tolist() == x[1:].tolist()
    with pytest.raises(RuntimeError, match="either 'devices' or 'out'"):
        torch.cuda.comm.broadcast(x)


def test_manyhands_own_trainer_goes_on_with_the_cpu() -> None:
    """Its ranks are processes, each with plain tensors of the host."""
    with mh.virtual_devices(2, as_cuda=True):
        assert [str(device) for device in mh.Trainer(max_epochs=1, devices=["cpu"]).ranks] == ["cpu"]
        assert [str(device) for device in mh.Trainer(max_epochs=1, num_gpus=2).ranks] == ["cpu", "cpu"]
    assert "manyhands.backends.torch.cuda_stand_in.replaced" in sys.modules


@pytest.mark.parametrize("example", EXAMPLES, ids=["names", "by hand"])
def test_the_examples_of_the_page_run(example: str) -> None:
    exec(compile(example.replace("virtual_devices(2)", "virtual_devices(2, as_cuda=True)"), str(PAGE), "exec"), {})


def test_the_command_runs_a_script_as_it_is(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_VIRTUAL_DEVICES", raising=False)
    (tmp_path / "helper.py").write_text("def last(): import torch; return torch.cuda.device_count() - 1\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, helper\n"
        "if __name__ == '__main__':\n"
        "    print(torch.ones(1).cuda(helper.last()), sys.argv[1:])\n"
        "    sys.exit(3)\n"
    )
    assert cli.main(["simulate", "--devices", "3", str(script), "--epochs", "2"]) == 3
    assert capsys.readouterr().out == "tensor([1.], device='cuda:2') ['--epochs', '2']\n"
    assert cli.main(["simulate", str(tmp_path / "no.py")]) == 1
    script.write_text("import argparse; argparse.ArgumentParser().parse_args()\n")
    assert cli.main(["simulate", str(script), "--devices", "3"]) == 2
    assert "--devices went to train.py: options of manyhands simulate go before the script" in capsys.readouterr().err

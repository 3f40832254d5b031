"""The model of scaling: pure, without a framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from manyhands.errors import BadProfile, BadSettings, EngineError
from manyhands.forecast.forecast import Forecast
from manyhands.forecast.links import LINKS, Link, all_reduce, link
from manyhands.forecast.profile import Bucket, MemoryByPart, MemoryLine, Profile, StepTime, memory_lines
from manyhands.forecast.scaling import Assumptions, largest_shard, rows

PLAIN = Link("plain", "measured", ((1 << 30, 1e9),), 1 << 30, None, 0.0)


def profile(**changes: Any) -> Profile:
    chosen = {"times": (StepTime(64, 0.1, 0.2, 0.0),), "buckets": (Bucket(100_000_000, 1.0),), **changes}
    return Profile("net", "gpu", 64, **chosen)


def test_a_ring_moves_each_byte_nearly_twice() -> None:
    assert all_reduce(PLAIN, 1e9, 2).total == pytest.approx(1.0)
    assert all_reduce(PLAIN, 1e9, 4).total == pytest.approx(1.5)
    assert all_reduce(PLAIN, 1e9, 1).total == 0


def test_a_small_all_reduce_costs_latency_a_large_one_bandwidth() -> None:
    small, large = all_reduce(LINKS["nvlink"], 1e3, 8), all_reduce(LINKS["nvlink"], 1e9, 8)
    assert small.latency > 10 * small.moving
    assert large.moving > 10 * large.latency
    # A ring over 1,024 devices would take 14 ms of hops; NCCL takes a tree there.
    assert all_reduce(LINKS["nvlink"], 1e3, 1024).total < 1e-3


@given(st.integers(1, 2000), st.floats(1, 1e10), st.sampled_from(sorted(LINKS)))
def test_more_bytes_never_take_less(devices: int, size: float, name: str) -> None:
    assert all_reduce(LINKS[name], 2 * size, devices).total >= all_reduce(LINKS[name], size, devices).total


def test_what_is_ready_early_is_summed_beside_the_backward_pass() -> None:
    perfect = Assumptions(hidden=1.0, jitter=0.0)
    buckets = (Bucket(50_000_000, 0.5), Bucket(50_000_000, 1.0))
    late, early = profile(), profile(buckets=buckets)
    (one,) = rows(late, PLAIN, [2], per_device=True, assumptions=perfect)
    assert one.seconds == pytest.approx(0.3 + 0.1)
    (half,) = rows(early, PLAIN, [2], per_device=True, assumptions=perfect)
    assert half.seconds == pytest.approx(0.3 + 0.05)
    (not_hidden,) = rows(early, PLAIN, [2], per_device=True, assumptions=Assumptions(hidden=0.0, jitter=0.0))
    assert not_hidden.seconds == pytest.approx(0.3 + 0.1)
    assert not_hidden.terms["contention"] == pytest.approx(0.05)


def test_the_terms_add_up_and_one_device_is_itself() -> None:
    made = rows(profile(), LINKS["pcie"], [1, 2, 8, 64, 1024])
    for row in made:
        assert sum(row.terms.values()) == pytest.approx(row.seconds)
    assert made[0].seconds == pytest.approx(0.3)
    assert (made[0].speed_up, made[0].efficiency, made[0].worst_term) == (1, 1, None)


@given(st.floats(0.001, 10), st.floats(1e4, 1e10), st.integers(1, 4096), st.sampled_from(sorted(LINKS)))
def test_devices_are_never_better_than_perfect(seconds: float, size: float, devices: int, name: str) -> None:
    published = Profile.of(seconds, size, batch_size=64)
    for per_device in (True, False):
        (row,) = rows(published, LINKS[name], [devices], per_device=per_device)
        assert row.efficiency <= 1 + 1e-9
        assert row.pays_from is None or row.pays_from % devices == 0


def test_the_batch_size_at_which_devices_pay_is_where_they_do() -> None:
    host_bound = profile(times=(StepTime(16, 0.02, 0.04, 0.0), StepTime(64, 0.04, 0.08, 0.0)))
    (row,) = rows(host_bound, LINKS["pcie"], [4])
    (at,) = rows(host_bound, LINKS["pcie"], [4], row.pays_from)
    (below,) = rows(host_bound, LINKS["pcie"], [4], row.pays_from - 4)
    assert at.pays
    assert not below.pays


def test_devices_made_of_one_cpu_take_turns() -> None:
    cpu = profile(times=(StepTime(64, 0.1, 0.2, 0.0), StepTime(32, 0.05, 0.1, 0.0)), kind="cpu", capacity=100)
    still = Assumptions(jitter=0.0, hidden=1.0)
    (four,) = rows(cpu, Link("fast", "measured", ((1 << 30, 1e15),), 1 << 30, None, 0.0), [4], assumptions=still)
    assert four.seconds == pytest.approx(0.3)  # a quarter of the samples each, one after the other
    assert four.worst_term == "contention"
    apart = rows(cpu, LINKS["ethernet-100g"], [4], assumptions=still)[0]
    assert apart.terms["contention"] == pytest.approx(0, abs=1e-3)  # a machine for each


@pytest.mark.parametrize("per_device", [True, False])
def test_a_forecast_from_a_node_is_that_from_one_of_its_devices(per_device: bool) -> None:
    one, between = Profile.of(0.1, 102e6, batch_size=32), link("nvlink-v100")
    (eight,) = rows(one, between, [8], per_device=True)
    node = Profile.of(eight.seconds, 102e6, batch_size=256, devices=8)
    from_one = rows(one, between, [8, 16, 64], None if per_device else 256, per_device=per_device)
    from_node = rows(node, between, [8, 16, 64], per_device=per_device)
    for known, row in zip(from_one, from_node, strict=True):
        assert row.seconds == pytest.approx(known.seconds)
        # Over the node with as many samples, for which its gradients cost less.
        assert row.speed_up == pytest.approx(known.speed_up / from_one[0].speed_up, rel=0.02 if per_device else 1e-6)
        assert row.efficiency == pytest.approx(row.speed_up * 8 / row.devices)
    assert from_node[0].seconds == pytest.approx(eight.seconds)
    assert (from_node[0].efficiency, from_node[0].worst_term) == (pytest.approx(1), None)


def test_a_node_in_a_file_and_in_words(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text('{"schema": 1, "seconds": 0.104, "gradient_bytes": 102e6, "batch_size": 256, "devices": 8}')
    node = Profile.load(path)
    assert node == Profile.of(0.104, 102e6, batch_size=256, devices=8)
    assert Profile.load(node.save(path)) == node
    made = Forecast.of(node, link("nvlink-v100"), [8, 16, 32], per_device=True)
    assert "32 devices pay: 3.85 times the speed of 8, 96% efficient" in made.headline
    assert "step, each 8 devices' batch 256, on 8 x device: 104 ms a step" in str(made)
    assert [row["base_devices"] for row in made.as_dict()["rows"]] == [8, 8, 8]
    path.write_text('{"schema": 1, "seconds": 0.1, "gradient_bytes": 1, "batch": 2}')
    with pytest.raises(BadProfile, match="unexpected keyword argument 'batch'"):
        Profile.load(path)
    with pytest.raises(BadSettings, match="give multiples of 8"):
        Forecast.of(node, link("nvlink-v100"), [8, 12])
    with pytest.raises(BadSettings, match="each device has an equal part"):
        Profile.of(0.1, 1e6, batch_size=12, devices=8)
    with pytest.raises(BadSettings, match="cannot be over link 'ethernet-10g'"):
        Forecast.of(node, link("ethernet-10g"), [8])


def test_a_step_waits_for_samples_that_its_machine_has_to_prepare() -> None:
    slow = Assumptions(input_rate=640.0, jitter=0.0)
    one, eight, sixteen = rows(profile(), LINKS["nvlink"], [1, 8, 16], per_device=True, assumptions=slow)
    assert one.seconds == pytest.approx(0.3)  # 213 samples a second
    assert eight.seconds == pytest.approx(8 * 64 / 640)
    assert sixteen.seconds == pytest.approx(8 * 64 / 640)  # two machines
    assert eight.worst_term == "input"
    assert sum(eight.terms.values()) == pytest.approx(eight.seconds)
    (slower,) = rows(profile(), LINKS["nvlink"], [1], assumptions=Assumptions(input_rate=64.0))
    assert slower.seconds == pytest.approx(1.0)


def test_a_disturbed_measurement_makes_no_small_batch_slower() -> None:
    noisy = profile(times=(StepTime(64, 0.1, 0.2, 0.0), StepTime(32, 0.2, 0.1, 0.0)))
    assert noisy.step(64).total == pytest.approx(0.3)
    assert noisy.step(32).forward == pytest.approx(0.1)
    assert noisy.step(128).backward == pytest.approx(0.4)


def test_memory_is_on_a_line_and_fits_or_not() -> None:
    lines = (
        MemoryLine(False, MemoryByPart(weights=100), MemoryByPart(activations=10)),
        MemoryLine(False, MemoryByPart(weights=100, gradients=100), MemoryByPart(activations=1)),
        MemoryLine(True, MemoryByPart(weights=100, gradients=100, optimizer=1), MemoryByPart(activations=10)),
    )
    made = Forecast.of(profile(memory=lines, capacity=700), PLAIN, [1, 2, 4])
    one, two, four = made.rows
    assert one.memory.total == 740
    assert (one.fits, two.fits, four.fits) == (False, True, True)
    assert two.memory.as_dict()["optimizer"] == 1
    assert made.headline.startswith("the batch does not fit on 1 device: 64 samples on one device would take 0.0 MB")
    assert largest_shard(made.profile, PLAIN, 1) == 60
    none = Forecast.of(profile(memory=lines, capacity=99), PLAIN, [2])
    assert "32 samples on each of 2 devices would take" in none.headline
    assert "and not even one sample would fit" in none.headline


def test_the_peak_moves_with_the_batch_size() -> None:
    """x of one byte a sample; then a gradient of 10 bytes beside it, and in the end two such alone."""

    def moments(batch: int) -> list[MemoryByPart]:
        return [
            MemoryByPart(activations=batch),
            MemoryByPart(gradients=10, activations=batch),
            MemoryByPart(gradients=10, optimizer=10),
        ]

    lines = memory_lines(False, (2, moments(2)), (4, moments(4)))
    one = profile(memory=tuple(lines))
    for batch, peak in ((1, 20), (4, 20), (10, 20), (11, 21), (1000, 1010)):
        memory = one.memory_of(batch, 1)
        assert memory.total == peak
    assert len(lines) == 2
    (through_both,) = memory_lines(False, (2, moments(2)), (4, moments(4)[:2]))  # not the same operations
    assert through_both.at(4).total == 14


def test_the_first_line_says_where_devices_do_not_pay() -> None:
    small = Profile.of(0.0025, 1.7e6, batch_size=64, tensors=8)
    slower = Forecast.of(small, link("pcie3"), [1, 2], assumptions=Assumptions(one_process=True))
    assert str(slower).splitlines()[0].startswith("2 devices do not pay: 2 devices give 0.7")
    large = Forecast.of(Profile.of(0.1, 102e6, batch_size=32), link("nvlink"), [1, 8], per_device=True)
    assert str(large).splitlines()[0].startswith("8 devices pay: 7.")
    loses = Forecast.of(Profile.of(0.1, 102e6, batch_size=32), link("ethernet-10g"), [1, 8], per_device=True)
    assert "8 devices do not pay" in loses.headline
    assert "communication eats most of the gain; they pay from batch size" in loses.headline
    assert json.loads(json.dumps(loses.as_dict()))["rows"][1]["worst_term"] == "communication"


def test_links_by_name_and_from_files(tmp_path: Path) -> None:
    assert link("pcie+ethernet-25g").network == LINKS["ethernet-25g"].network
    assert link("nvlink", per_node=4).nodes(8) == 2
    for name, one in LINKS.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(one.as_dict()))
        assert link(str(path)) == one
    path.write_text(json.dumps({"schema": 1, "bandwidth": 5e9, "hop": 1e-5, "network": "ethernet-100g"}))
    assert link(str(path)).bandwidth(8) == 5e9


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("{", "no JSON"),
        ("[]", "a list instead of an object"),
        ('{"schema": 7}', "has version 7, this manyhands reads version 1: measure again"),
        ('{"schema": 1}', "is not a profile of manyhands: KeyError"),
        ('{"schema": 1, "name": "a", "device": "b", "batch_size": 1, "times": [], "buckets": []}', "above 0"),
        ('{"schema": 1, "name": "a", "device": "b", "batch_size": 1, "times": [3], "buckets": []}', "TypeError"),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path: Path, fields: str, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(fields)
    with pytest.raises(BadProfile, match=words) as caught:
        Profile.load(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="cannot be read: No such file"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(BadProfile, match="cannot be written: there is no folder"):
        profile().save(tmp_path / "none" / "p.json")
    for name in ("nvlnk", "pcie+nvlink", "carrier-pigeon.json"):
        with pytest.raises((BadSettings, BadProfile), match=r"not known|not a network|cannot be read"):
            link(name)
    with pytest.raises(BadSettings, match="say what is inside a node"):
        link("ethernet-100g", per_node=8)
    with pytest.raises(BadSettings, match=r"a hop .* where it is measured"):
        Link("bad", "measured", ((8, 1e9),))
    with pytest.raises(BadSettings, match="bandwidth above 0"):
        Link("bad", "pcie", ((8, 0.0),))
    for devices in ([], [0], [1.5], [True]):
        with pytest.raises(BadSettings, match="whole numbers of at least 1"):
            rows(profile(), PLAIN, devices)  # type: ignore[arg-type]
    with pytest.raises(BadSettings, match="a step takes time"):
        Profile.of(0, 1)
    with pytest.raises(BadSettings, match="parts of 1"):
        Assumptions(hidden=2)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = Forecast.of(Profile.of(0.1, 102e6, batch_size=32), link("nvlink"), [1, 2, 8, 64])
    assert made.plot(tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(EngineError, match="the suffix says"):
        made.plot(tmp_path / "p.txt")

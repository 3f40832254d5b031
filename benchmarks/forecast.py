"""What forecasts are worth: against published training times, and against real ranks.

    python benchmarks/forecast.py [--json]                             published times; needs no framework and no GPU
    python benchmarks/forecast.py --ranks 1,2,4 --link nvlink-h200     this machine: forecast, then train with as many
    manyhands parallel benchmarks/forecast.py:ensemble --devices 16    a plan of lanes on more devices, simulated

Each published table is given one device's time, the size of the gradients and the link, nothing else; what the
publication says of the software (who copies gradients, who drives the devices) is in the row. Sources stand beside the
figures. The second group was not in the list that the model was checked with while it was written; the third was found
and computed when it had long been finished.

A plan's tasks are measured here; where they are done, and the copies between devices (25 GB/s, 10 us each), are
simulated. The 64 members of an ensemble need nothing of each other until their scores are averaged; in a stack, the
same products one after the other, each layer needs the one before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from manyhands.forecast.links import link
from manyhands.forecast.profile import Profile
from manyhands.forecast.scaling import DDP_COPIES, PAYS, Assumptions, rows

if TYPE_CHECKING:
    from torch import Tensor

MB = 1e6
DDP = Assumptions(copies=DDP_COPIES)
PLAIN = Assumptions()
ONE_PROCESS = Assumptions(one_process=True)


@dataclass(frozen=True)
class Table:
    """Seconds a step by the number of devices; weak scaling unless ``strong``."""

    source: str
    model: str
    link: str
    gradient_bytes: float
    one: float
    several: dict[int, float]
    assumptions: Assumptions = PLAIN
    tensors: int = 0
    strong: bool = False
    # Whether errors count: a sign can be judged where the time includes more than steps.
    timed: bool = True
    per_node: int | None = None
    batch: int = 64  # of each device
    base: int = 1  # devices that ``one`` is the time of: a node


def _rates(batch: int, one: float, several: dict[int, float]) -> dict[str, Any]:
    """Seconds a step from samples a second over all devices."""
    return {"batch": batch, "one": batch / one, "several": {n: n * batch / rate for n, rate in several.items()}}


_DDP = "PyTorch benchmarks/distributed/ddp, V100, batch 32"
_MXNET = "NVIDIA DeepLearningExamples, MXNet"
_TF = "TensorFlow benchmarks, May 2017, DGX-1 P100"
_P100 = "nvlink-p100-nccl1"
# Gradients of mixed precision are half as large: 25.6 million numbers of two bytes.
_HALF = 51.1 * MB

TABLES = (
    Table(_DDP, "ResNet-50", "nvlink-v100", 102 * MB, 0.097, {2: 0.103, 4: 0.103, 8: 0.104, 16: 0.104}, DDP),
    Table(_DDP, "ResNet-101", "nvlink-v100", 178 * MB, 0.162, {2: 0.176, 4: 0.176, 8: 0.179, 16: 0.179}, DDP),
    Table(_DDP, "ResNeXt-50", "nvlink-v100", 100 * MB, 0.145, {2: 0.153, 4: 0.153, 8: 0.157, 16: 0.157}, DDP),
    Table(_DDP, "ResNeXt-101", "nvlink-v100", 355 * MB, 0.415, {2: 0.438, 4: 0.439, 8: 0.447, 16: 0.450}, DDP),
    Table(f"{_MXNET}, A100", "ResNet-50 AMP", "nvlink-a100", _HALF, **_rates(256, 3410, {4: 13443, 8: 26674})),
    Table(
        f"{_MXNET}, DGX-1 V100",
        "ResNet-50 AMP",
        "nvlink-v100",
        _HALF,
        **_rates(192, 1376, {2: 2768, 4: 5357, 8: 10723}),
    ),
    Table(
        f"{_MXNET}, DGX-2",
        "ResNet-50 AMP",
        "nvlink-v100-dgx2",
        _HALF,
        **_rates(256, 1492, {2: 2935, 4: 5726, 8: 11368, 16: 21484}),
    ),
    Table(_TF, "AlexNet b512", _P100, 249.5 * MB, **_rates(512, 2987, {2: 5658, 4: 10509, 8: 17822})),
    Table(_TF, "VGG-16 b64", _P100, 553.4 * MB, **_rates(64, 154, {2: 295, 4: 584, 8: 1081})),
    Table(_TF, "VGG-16 b32", _P100, 553.4 * MB, **_rates(32, 144, {2: 281, 4: 549, 8: 820})),
    Table(_TF, "ResNet-50 b64", _P100, 102.2 * MB, **_rates(64, 219, {2: 422, 4: 852, 8: 1734})),
    # 30 epochs of 45,000 images in batches of 64, divided over the GPUs by one Lua thread (nn.DataParallelTable).
    Table(
        "NVIDIA DIGITS PR 480, two Titan X",
        "LeNet",
        "pcie3",
        1.72 * MB,
        53 / (30 * 704),
        {2: 90 / (30 * 704)},
        ONE_PROCESS,
        tensors=8,
        strong=True,
        timed=False,
    ),
)
_K80 = "TensorFlow benchmarks, May 2017, K80"
MORE_TABLES = (
    Table(_TF, "InceptionV3 b64", _P100, 95.4 * MB, **_rates(64, 142, {2: 284, 4: 569, 8: 1131})),
    Table(_TF, "ResNet-152 b64", _P100, 240.8 * MB, **_rates(64, 91.8, {2: 181, 4: 356, 8: 716})),
    Table(_TF, "InceptionV3 b32", _P100, 95.4 * MB, **_rates(32, 128, {2: 259, 4: 520, 8: 995})),
    Table(_TF, "ResNet-50 b32", _P100, 102.2 * MB, **_rates(32, 195, {2: 368, 4: 768, 8: 1485})),
    Table(_TF, "ResNet-152 b32", _P100, 240.8 * MB, **_rates(32, 82.7, {2: 160, 4: 317, 8: 632})),
    Table(f"{_K80}, GCE", "InceptionV3 b64", "pcie3", 95.4 * MB, **_rates(64, 30.5, {2: 57.8, 4: 116, 8: 227})),
    Table(f"{_K80}, GCE", "ResNet-50 b64", "pcie3", 102.2 * MB, **_rates(64, 51.9, {2: 99, 4: 195, 8: 387})),
    Table(f"{_K80}, GCE", "ResNet-152 b32", "pcie3", 240.8 * MB, **_rates(32, 20, {2: 38.2, 4: 75.8, 8: 148})),
    Table(f"{_K80}, GCE", "AlexNet b512", "pcie3", 249.5 * MB, **_rates(512, 656, {2: 1209, 4: 2328, 8: 4640})),
    Table(f"{_K80}, GCE", "VGG-16 b32", "pcie3", 553.4 * MB, **_rates(32, 35.4, {2: 64.8, 4: 120, 8: 234})),
    Table(f"{_K80}, EC2", "InceptionV3 b64", "pcie3", 95.4 * MB, **_rates(64, 30.8, {2: 58.7, 4: 117, 8: 230})),
    Table(f"{_K80}, EC2", "ResNet-50 b64", "pcie3", 102.2 * MB, **_rates(64, 51.5, {2: 98, 4: 195, 8: 384})),
    Table(f"{_K80}, EC2", "ResNet-152 b32", "pcie3", 240.8 * MB, **_rates(32, 19.7, {2: 37.6, 4: 74.9, 8: 149})),
    Table(f"{_K80}, EC2", "AlexNet b512", "pcie3", 249.5 * MB, **_rates(512, 684, {2: 1244, 4: 2479, 8: 4853})),
    Table(f"{_K80}, EC2", "VGG-16 b32", "pcie3", 553.4 * MB, **_rates(32, 36.3, {2: 69.4, 4: 141, 8: 260})),
    Table(f"{_MXNET}, DGX A100 80 GB", "ResNet-50 AMP", "nvlink-a100", _HALF, **_rates(256, 2180, {2: 4332, 8: 16925})),
    Table(
        f"{_MXNET}, DGX-1 V100",
        "ResNet-50 fp32",
        "nvlink-v100",
        102.2 * MB,
        **_rates(96, 384, {2: 763, 4: 1513, 8: 3005}),
    ),
    Table(
        f"{_MXNET}, DGX-2",
        "ResNet-50 fp32",
        "nvlink-v100-dgx2",
        102.2 * MB,
        **_rates(128, 417, {2: 821, 4: 1623, 8: 3223, 16: 6338}),
    ),
)

# NVIDIA's DeepLearningExamples in PyTorch (DDP): computed last, when nothing in the model was changed any more. Whole
# tables; batch sizes and precisions are those of the repository's configurations. Apex' O2 (Transformer-XL, BERT) keeps
# half-precision gradients, autocast (Jasper, the image nets) those of single precision.
_EXAMPLES = "NVIDIA DeepLearningExamples, PyTorch"
_A100, _V100, _DGX2 = "nvlink-a100", "nvlink-v100", "nvlink-v100-dgx2"
_MACHINES = {_A100: "DGX A100", _V100: "DGX-1 V100", _DGX2: "DGX-2"}


def _example(
    model: str, between: str, parameters: float, batch: int, one: float, several: dict[int, float], *, width: int = 4
) -> Table:
    """Parameters in millions, bytes of a gradient, samples (or tokens) a device and step, and a second."""
    rates = _rates(batch, one, several)
    return Table(
        f"{_EXAMPLES}, {_MACHINES[between]}", model, between, width * parameters * MB, **rates, assumptions=DDP
    )


def _transformer_xl() -> Iterator[Table]:
    """192 (base) and 384 (large) tokens a sequence; 191.9 and 284 million parameters by the repository's sizes."""
    rows: list[tuple[str, str, int, int, float, dict[int, float]]] = [
        (_A100, "base", 32, 4, 41527, {2: 77625, 4: 153945, 8: 305933}),
        (_A100, "base", 32, 2, 59961, {2: 113238, 4: 225609, 8: 449890}),
        (_A100, "large", 8, 4, 14497, {2: 27304, 4: 53756, 8: 106651}),
        (_A100, "large", 8, 2, 21554, {2: 40222, 4: 80226, 8: 159185}),
        (_A100, "large", 16, 2, 25084, {2: 48562, 4: 95997, 8: 191148}),
        (_V100, "base", 16, 4, 13981, {2: 23163, 4: 48893, 8: 97005}),
        (_V100, "base", 16, 2, 26639, {2: 45299, 4: 92618, 8: 170532}),
        (_V100, "base", 32, 2, 36692, {2: 65889, 4: 133838, 8: 258648}),
        (_V100, "large", 2, 4, 3558, {2: 6153, 4: 12492, 8: 24595}),
        (_V100, "large", 2, 2, 6907, {2: 11272, 4: 22530, 8: 40920}),
        (_V100, "large", 4, 2, 10210, {2: 17984, 4: 36340, 8: 66716}),
        (_DGX2, "base", 16, 4, 16150, {2: 29712, 4: 58011, 8: 114655, 16: 222920}),
        (_DGX2, "base", 16, 2, 32875, {2: 59058, 4: 113985, 8: 223907, 16: 414994}),
        (_DGX2, "large", 8, 4, 5169, {2: 9977, 4: 19691, 8: 39157, 16: 77568}),
        (_DGX2, "large", 8, 2, 14787, {2: 27710, 4: 54207, 8: 107073, 16: 211387}),
    ]
    for between, size, batch, width, one, several in rows:
        name = f"Transformer-XL {size} b{batch} {'fp16' if width == 2 else 'fp32'}"
        parameters, tokens = (191.9, 192) if size == "base" else (284.0, 384)
        yield _example(name, between, parameters, batch * tokens, one, several, width=width)


LAST_TABLES = (
    *_transformer_xl(),
    _example("Jasper b32 TF32", _A100, 333, 32, 42.18, {4: 157.49, 8: 310.10}),
    _example("Jasper b32 AMP", _A100, 333, 32, 64.32, {4: 239.23, 8: 470.09}),
    _example("Jasper b64 TF32", _A100, 333, 64, 49.64, {4: 192.66, 8: 371.41}),
    _example("Jasper b64 AMP", _A100, 333, 64, 75.59, {4: 289.16, 8: 547.91}),
    _example("Jasper b16 fp32", _V100, 333, 16, 10.71, {4: 40.28, 8: 78.23}),
    _example("Jasper b16 AMP", _V100, 333, 16, 27.87, {4: 99.80, 8: 193.89}),
    _example("Jasper b32 fp32, 32 GB", _V100, 333, 32, 12.22, {4: 46.97, 8: 92.44}),
    _example("Jasper b32 AMP, 32 GB", _V100, 333, 32, 34.08, {4: 128.39, 8: 249.0}),
    _example("Jasper b64 AMP, 32 GB", _V100, 333, 64, 39.30, {4: 150.18, 8: 282.68}),
    _example("Jasper b32 fp32", _DGX2, 333, 32, 13.46, {4: 51.38, 8: 100.54, 16: 188.14}),
    _example("Jasper b32 AMP", _DGX2, 333, 32, 38.94, {4: 143.44, 8: 280.48, 16: 515.90}),
    _example("Jasper b64 AMP", _DGX2, 333, 64, 43.86, {4: 165.27, 8: 318.10, 16: 567.47}),
    _example("BERT-large SQuAD b32 TF32", _A100, 335, 32, 61.5, {8: 469.8}),
    _example("BERT-large SQuAD b32 fp16", _A100, 335, 32, 110.5, {8: 846.7}, width=2),
    _example("BERT-large SQuAD b8 fp32", _V100, 335, 8, 12, {8: 85.5}),
    _example("BERT-large SQuAD b16 fp16", _V100, 335, 16, 52, {8: 382}, width=2),
    _example("ResNet-50 b256 TF32", _A100, 25.56, 256, 938, {8: 7248}),
    _example("ResNet-50 b256 AMP", _A100, 25.56, 256, 2470, {8: 16621}),
    _example("ResNet-50 b112 fp32", _V100, 25.56, 112, 367, {8: 2855}),
    _example("ResNet-50 b256 AMP", _V100, 25.56, 256, 1200, {8: 8322}),
    _example("ResNeXt-101 b128 TF32", _A100, 44.18, 128, 456, {8: 3471}),
    _example("ResNeXt-101 b128 AMP", _A100, 44.18, 128, 1211, {8: 7925}),
    _example("ResNeXt-101 b64 fp32", _V100, 44.18, 64, 147, {8: 1133}),
    _example("ResNeXt-101 b128 AMP", _V100, 44.18, 128, 587, {8: 4065}),
    _example("SE-ResNeXt-101 b128 TF32", _A100, 48.96, 128, 395, {8: 2991}),
    _example("SE-ResNeXt-101 b128 AMP", _A100, 48.96, 128, 855, {8: 5779}),
    _example("SE-ResNeXt-101 b64 fp32", _V100, 48.96, 64, 132, {8: 1004}),
    _example("SE-ResNeXt-101 b112 AMP", _V100, 48.96, 112, 443, {8: 2971}),
)


def _efficientnets(images: dict[str, float] | None = None) -> Iterator[Table]:
    """The same repository's EfficientNets, 21.03: batch sizes, and images a second of 1 and 8 GPUs.

    Left out are rows in which eight GPUs are 15 to 18 times as fast as one (DGX-1 with 32 GB). ``images``: how many a
    second a machine prepares.
    """
    figures: list[tuple[str, str, float, int, float, float]] = [
        (_A100, "B0 TF32", 5.29, 256, 1078, 8193),
        (_A100, "B0 AMP", 5.29, 256, 2489, 16652),
        (_A100, "B4 TF32", 19.34, 64, 157, 1223),
        (_A100, "B4 AMP", 19.34, 128, 331, 2570),
        (_A100, "WideSE-B0 TF32", 8.43, 256, 1078, 8244),
        (_A100, "WideSE-B0 AMP", 8.43, 256, 2512, 16368),
        (_A100, "WideSE-B4 TF32", 34.93, 64, 157, 1223),
        (_A100, "WideSE-B4 AMP", 34.93, 128, 331, 2585),
        (_V100, "B0 fp32", 5.29, 64, 655, 4672),
        (_V100, "B0 AMP", 5.29, 128, 1301, 7789),
        (_V100, "B4 fp32", 19.34, 16, 83, 616),
        (_V100, "B4 AMP", 19.34, 32, 204, 1366),
        (_V100, "WideSE-B0 fp32", 8.43, 64, 655, 4592),
        (_V100, "WideSE-B0 AMP", 8.43, 128, 1299, 7875),
        (_V100, "WideSE-B4 fp32", 34.93, 16, 83, 612),
        (_V100, "WideSE-B4 AMP", 34.93, 32, 204, 1356),
        (_V100, "B0 fp32, 32 GB", 5.29, 128, 646, 4937),
        (_V100, "B0 AMP, 32 GB", 5.29, 256, 1401, 8615),
    ]
    for between, name, parameters, batch, one, eight in figures:
        table = _example(f"EfficientNet-{name}", between, parameters, batch, one, {8: eight})
        if images is not None and "B0" in name:
            table = replace(table, assumptions=replace(DDP, input_rate=images[between]))
        yield table


# What ResNet-50 in mixed precision gets on eight GPUs of the same machines, from images of the same size (LAST_TABLES).
_IMAGES = {_A100: 16621.0, _V100: 8322.0}
EFFICIENTNETS, EFFICIENTNETS_WITH_INPUT = (tuple(_efficientnets(images)) for images in (None, _IMAGES))


def _from_a_node() -> Iterator[Table]:
    """EfficientNets on several DGX A100, from the time of one DGX A100 with its eight GPUs."""
    figures: list[tuple[str, float, int, float, dict[int, float]]] = [
        ("B0 TF32", 5.29, 256, 8193, {16: 16137}),
        ("B0 AMP", 5.29, 256, 16652, {16: 29332}),
        ("B4 TF32", 19.34, 64, 1223, {16: 2417, 32: 4813, 64: 9146}),
        ("B4 AMP", 19.34, 128, 2570, {16: 4813, 32: 9425, 64: 18900}),
        ("WideSE-B0 TF32", 8.43, 256, 8244, {16: 16062}),
        ("WideSE-B0 AMP", 8.43, 256, 16368, {16: 29798}),
        ("WideSE-B4 TF32", 34.93, 64, 1223, {16: 2399, 32: 4616, 64: 9140}),
        ("WideSE-B4 AMP", 34.93, 128, 2585, {16: 5041, 32: 9379, 64: 18516}),
    ]
    for name, parameters, batch, eight, several in figures:
        yield replace(_example(f"EfficientNet-{name}", _A100, parameters, batch, eight / 8, several), base=8)


NODES = tuple(_from_a_node())


GROUPS = {
    "tables": TABLES,
    "more tables": MORE_TABLES,
    "last tables": LAST_TABLES,
    "EfficientNets": EFFICIENTNETS,
    "EfficientNets, B0 with the images a second that ResNet-50 gets": EFFICIENTNETS_WITH_INPUT,
    "EfficientNets, from one node": NODES,
}


@dataclass(frozen=True)
class Case:
    table: Table
    devices: int
    published: float
    predicted: float
    published_pays: bool
    predicted_pays: bool
    within_a_node: bool
    error: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", self.predicted / self.published - 1)


def cases(tables: tuple[Table, ...]) -> Iterator[Case]:
    for table in tables:
        between = link(table.link, table.per_node)
        profile = Profile.of(
            table.one,
            table.gradient_bytes,
            batch_size=table.batch * table.base,
            tensors=table.tensors,
            devices=table.base,
        )
        forecast = rows(profile, between, [*table.several], per_device=not table.strong, assumptions=table.assumptions)
        for row, published in zip(forecast, table.several.values(), strict=True):
            ideal = table.one / row.devices if table.strong else table.one
            pays = ideal / published >= PAYS
            yield Case(table, row.devices, published, row.seconds, pays, row.pays, between.nodes(row.devices) == 1)


def summary(group: tuple[Table, ...]) -> dict[str, Any]:
    compared = [*cases(group)]
    inside = [abs(case.error) for case in compared if (case.within_a_node or case.table.base > 1) and case.table.timed]
    return {
        "rows": len(inside),
        "median_error": statistics.median(inside),
        "worst_error": max(inside),
        "verdicts_right": sum(case.published_pays == case.predicted_pays for case in compared),
        "verdicts": len(compared),
        "cases": compared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON; default: Markdown")
    parser.add_argument("--ranks", help="numbers of GPUs of this machine to train with; default: published times only")
    parser.add_argument("--link", default="nvlink", help="the link between these GPUs; default: nvlink")
    options = parser.parse_args()
    if options.ranks is not None:
        against_ranks([int(count) for count in options.ranks.split(",")], options.link)
        return
    answer = {}
    for title, group in GROUPS.items():
        result = summary(group)
        compared = result.pop("cases")
        answer[title] = {**result, "cases": [_as_dict(case) for case in compared]}
        if not options.json:
            _show(title, result, compared)
    if options.json:
        print(json.dumps(answer, indent=2))


def _as_dict(case: Case) -> dict[str, Any]:
    return {
        "source": case.table.source,
        "model": case.table.model,
        "devices": case.devices,
        "published_seconds": case.published,
        "predicted_seconds": case.predicted,
        "error": case.error,
        "pays": [case.published_pays, case.predicted_pays],
    }


def _show(title: str, result: dict[str, Any], compared: list[Case]) -> None:
    print(
        f"{title}: {result['rows']} rows, median error {result['median_error']:.1%}, worst "
        f"{result['worst_error']:.1%}; whether N devices pay was right in {result['verdicts_right']} of "
        f"{result['verdicts']}\n\n"
        "| source | model | devices | published | predicted | error | pays: published, predicted |\n"
        "|---|---|---|---|---|---|---|"
    )
    words = {True: "yes", False: "no"}
    for case in compared:
        print(
            f"| {case.table.source} | {case.table.model} | {case.devices} | {case.published * 1e3:.4g} ms | "
            f"{case.predicted * 1e3:.4g} ms | {case.error:+.1%} | {words[case.published_pays]}, "
            f"{words[case.predicted_pays]} |"
        )
    print()


# Real ranks


def against_ranks(ranks: list[int], between: str, batch_size: int = 256, steps: int = 12, epochs: int = 4) -> None:
    """Forecast, then train with as many GPUs: the median of the epochs after the first."""
    from manyhands import torch as mh
    from manyhands.book import recipes
    from manyhands.forecast import measured

    model, batch = recipes.of("torch").model, measured.of("torch").noise(batch_size)
    made = mh.forecast(model("resnet18", 0), batch, devices=ranks, link=between)
    print(made, "\n\n| ranks | forecast | real | error |\n|---|---|---|---|")
    data = tuple(part.repeat(steps, *[1] * (part.dim() - 1)) for part in batch)
    for row in made.rows:
        trainer = mh.Trainer(
            epochs, devices=[f"gpu:{n}" for n in range(row.devices)], batch_size=batch_size, quiet=True
        )
        result = trainer.fit(model("resnet18", 0), data)
        real = statistics.median(epoch["seconds"] for epoch in result.rows[1:]) / steps
        print(f"| {row.devices} | {row.seconds * 1e3:.1f} ms | {real * 1e3:.1f} ms | {row.seconds / real - 1:+.1%} |")


# For ``manyhands parallel``


def inputs() -> list[Tensor]:
    """A batch, and a weight for each of 64 members."""
    import torch

    torch.manual_seed(0)
    return [torch.randn(256, 256), *(torch.randn(256, 256) / 16 for _ in range(64))]


def ensemble(batch: Tensor, *weights: Tensor) -> Tensor:
    """Each member's scores of ten classes on its own, four layers each, then their mean."""
    results = []
    for weight in weights:
        x = batch
        for _ in range(4):
            x = (x @ weight).relu()
        results.append(x @ weight[:, :10])
    import torch

    return torch.stack(results).mean(0)


def stack(batch: Tensor, *weights: Tensor) -> Tensor:
    """The same layers, one after the other."""
    for weight in weights:
        for _ in range(4):
            batch = (batch @ weight).relu()
    return batch


if __name__ == "__main__":
    main()

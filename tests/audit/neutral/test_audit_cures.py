"""Cures are right lines of their framework, or words where there is no such line."""

from __future__ import annotations

import ast
import contextlib
import io
from pathlib import Path

import pytest

from manyhands.audit.cures.cure import cure
from manyhands.audit.kinds import Kind

WORDS = ""  # no line of code can be the cure
DECIDE = "decide on the device"
RARELY = "if step % 100 == 0: "
# What a line is in a loop over `step`, and its cure.
LATER = "keep the value on the device, and read it once, after the loop"
STARTS = "    total, a, row = 0.0, [], 0.0\n"  # where in its scope a name begins does not matter
NEEDED = "takes numbers and has to wait: call it every 100 steps only, or once, with the values of many steps"
READS = [
    ("total += loss.item()", "total += loss.detach()"),
    ("return self._loss.item() / n", LATER),
    ("self.total += loss.item()", LATER),
    ("unknown += loss.item()", LATER),
    ("losses[step] = loss.item()", LATER),
    ("values = [v.detach().cpu().item() for v in y[0]]", "values = [v.detach() for v in y[0]]"),
    ("größe = (a + b).item()  # läuft", "größe = (a + b).detach()"),
    ("meter.update(loss.item(), n=4)", LATER),
    ("row = -y.min().item() + x[0].item() * 2", "row = -y.min().detach() + x[0].detach().clone() * 2"),
    ("row = {'a': y.min().item()}", LATER),
    ("rate = max(0.1, loss.item())", DECIDE),
    ("top = loss.item() if loss.item() > 3 else 0", DECIDE),
    ("if (top := loss.item()) > 3: best = top", DECIDE),
    ("v = loss.item(); best = v if v < best else best", DECIDE),
    ("m = np.mean([loss.item(), 2.0])", "mean() " + NEEDED),
    ("text = '%.3f' % loss.item()", WORDS),
    ("text = f'{loss.item():.3f}'", WORDS),
    ("ex = math.exp(loss.item())", "exp() " + NEEDED),
    ("x = table[loss.item()]", WORDS),
    ("run.log({'loss': loss.item()})", RARELY + "run.log({'loss': loss.item()})"),
    ("print(f'{loss.item():.3f}')", RARELY + "print(f'{loss.item():.3f}')"),
]


def _cured(tmp_path: Path, line: str, kind: Kind, call: str, framework: str = "torch", loop: str = "") -> str:
    file = tmp_path / f"train_{abs(hash((line, loop)))}.py"
    file.write_text(f"def f():\n    {loop or 'for step, batch in tqdm(enumerate(data)):'}\n        {line}\n{STARTS}")
    code = line.partition("  #")[0]
    return cure(kind, call, code, framework=framework, place=(str(file), 3))


@pytest.mark.parametrize(("line", "expected"), READS, ids=[line for line, _ in READS])
def test_a_read_is_left_out_only_where_nobody_needs_its_value(tmp_path: Path, line: str, expected: str) -> None:
    made = _cured(tmp_path, line, Kind.READ, "Tensor.item")
    if expected == DECIDE:
        assert made.startswith(DECIDE)
    elif expected == LATER:
        assert made.endswith(LATER)
    elif expected == WORDS:
        assert made == Kind.READ.cure_in("torch")
    else:
        assert made == expected
        if not expected.endswith(NEEDED):
            ast.parse(made)


def test_who_counts_the_steps_is_known_or_not(tmp_path: Path) -> None:
    for loop, begin in (
        ("for i in range(9):", "if i % 100"),
        ("for n, x in enumerate(tqdm(data)):", "if n % 100"),
        ("for x in data:", "count the steps, and run this line every 100"),
    ):
        assert _cured(tmp_path, "print(loss)", Kind.PRINT, "Tensor.__repr__", loop=loop).startswith(begin)
    rare = _cured(tmp_path, "print(loss)", Kind.PRINT, "Tensor.__repr__", loop="if step % 50 == 0:")
    assert rare == Kind.PRINT.cure_in("torch")


@pytest.mark.parametrize(
    ("line", "kind", "call", "framework", "expected"),
    [
        ("n = int(x.sum())", Kind.READ, "Tensor.__int__", "torch", "n = x.sum().detach().long()"),
        ("n = int(tf.sum(x))", Kind.READ, "Tensor.__int__", "tensorflow", "n = tf.cast(tf.sum(x), tf.int64)"),
        ("a.append(float(x + y))", Kind.READ, "Tensor.__float__", "torch", "a.append((x + y).detach())"),
        ("a.append(float(x + y))", Kind.READ, "Array.__float__", "jax", "a.append(x + y)"),
        ("b = 2 * float(x + y)", Kind.READ, "Array.__float__", "jax", "b = 2 * (x + y)"),
        ("total += loss.numpy()", Kind.TO_HOST, "Tensor.numpy", "tensorflow", "total += loss"),
        ("w = np.asarray(weights)", Kind.TO_HOST, "numpy.asarray", "jax", "w = weights"),
        ("a.append(loss.asnumpy())", Kind.TO_HOST, "NDArray.asnumpy", "mxnet", "a.append(loss.copy())"),
        ("last = loss.asscalar()", Kind.READ, "NDArray.asscalar", "mxnet", "last = loss.detach()"),
        ("y = step(x).block_until_ready()", Kind.SYNCHRONIZE, "Array.block_until_ready", "jax", "y = step(x)"),
        ("y = jax.block_until_ready(f(x))", Kind.SYNCHRONIZE, "jax.block_until_ready", "jax", "y = f(x)"),
        ("v = loss.cpu().item()", Kind.TO_HOST, "Tensor.cpu", "torch", "v = loss.detach()"),
        ("x, y = x.to(dev), y.to(f(dev))", Kind.BLOCKING, "Tensor.to", "torch",
         "x, y = x.to(dev, non_blocking=True), y.to(f(dev), non_blocking=True)"),
        ("x = torch.ones(4).to(dev)", Kind.TO_DEVICE, "Tensor.to", "torch", "x = torch.ones(4, device=dev)"),
        ("r = torch.tensor(0.1 * i, device=d)", Kind.DATA, "torch.tensor", "torch",
         "r = torch.full((), 0.1 * i, device=d)"),
        ("x[0, 1] = -2.5", Kind.DATA, "Tensor.__setitem__", "torch", "x[0, 1].fill_(-2.5)"),
        ("s = x[x > 0].mean() + 1", Kind.SHAPE, "Tensor.__getitem__", "torch",
         "s = (torch.where(x > 0, x, 0).sum() / (x > 0).sum()) + 1"),
        ("i = linalg.inv(f(a)).mT", Kind.CHECK, "torch.linalg.inv", "torch", "i = linalg.inv_ex(f(a))[0].mT"),
    ],
)  # fmt: skip
def test_a_line_becomes_another_line(
    tmp_path: Path, line: str, kind: Kind, call: str, framework: str, expected: str
) -> None:
    assert _cured(tmp_path, line, kind, call, framework) == expected
    ast.parse(expected)


@pytest.mark.parametrize(
    ("line", "kind", "call", "words"),
    [
        ("r = torch.tensor(values, device=d)", Kind.DATA, "torch.tensor", "make the tensor once"),
        ("s = x[y == 1].sum()", Kind.SHAPE, "Tensor.__getitem__", "compute with the mask"),
        ("h = F.one_hot(y)", Kind.SHAPE, "one_hot", "give the number of classes"),
        ("d = torch.linalg.eigh(a)", Kind.CHECK, "torch.linalg.eigh", "call it less often"),
        ("kept.append(x.cpu())", Kind.TO_HOST, "Tensor.cpu", "one torch.cuda.synchronize() before it is read"),
        ("buffer.copy_(x)", Kind.TO_DEVICE, "Tensor.copy_", "from pinned memory"),
        ("a = f(torch.from_numpy(b).to(d))", Kind.TO_DEVICE, "Tensor.to", ".pin_memory() before the copy"),
        ("x = x.to(d, non_blocking=True)", Kind.TO_DEVICE, "Tensor.to", "take x from pinned memory"),
        ("last = pred[i, n - 1]", Kind.READ, "Tensor.__getitem__", "use gather, index_select or a Python number"),
        ("p = pack(x, n.cpu())", Kind.TO_HOST, "Tensor.cpu", "pack() takes it on the host"),
        ("s, r = env.step(a.item())", Kind.READ, "Tensor.item", "step() takes numbers and has to wait"),
        ("torch.distributed.barrier()", Kind.COLLECTIVE, "torch.distributed.barrier", "remove this line"),
    ],
)
def test_where_no_line_is_sure_words_say_it(tmp_path: Path, line: str, kind: Kind, call: str, words: str) -> None:
    assert words in _cured(tmp_path, line, kind, call)


def test_libraries_that_are_known_have_cures_of_their_own() -> None:
    library = "/site-packages/torch/distributions/distribution.py"
    assert "validate_args=False" in cure(Kind.CONTROL_FLOW, "Tensor.__bool__", "d = Normal(m, s)", library)
    assert "the library's code" in cure(Kind.READ, "Tensor.item", "o.step(f)", "/torch/optim/lbfgs.py")
    assert "fused=True" in cure(Kind.READ, "Tensor.item", "scaler.step(o)", "/torch/amp/grad_scaler.py")
    trainer = "C:\\site-packages\\transformers\\trainer.py"
    assert "logging_nan_inf_filter=False" in cure(Kind.CONTROL_FLOW, "Tensor.__bool__", "t.train()", trainer)
    assert "logging_steps" in cure(Kind.READ, "Tensor.item", "t.train()", trainer)
    sent = "/accelerate/utils/operations.py"
    assert "non_blocking=True" in cure(Kind.BLOCKING, "Tensor.to", "for batch in loader:", sent)
    assert "the library's code" in cure(Kind.TO_HOST, "Tensor.cpu", "accelerator.gather(x)", sent)


def test_a_statement_of_several_lines_and_code_without_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "both = {\n    'a': float(y.min()),\n    'b': round(\n        y.item()),\n}\nz = (\n    y\n    .item()\n)\n"
    )

    def at(number: int, call: str) -> str:
        code = file.read_text().splitlines()[number - 1].strip()
        return cure(Kind.READ, call, code, place=(str(file), number))

    assert at(2, "Tensor.__float__").endswith(LATER)
    assert at(4, "Tensor.item") == f"round() {NEEDED}"
    assert at(8, "Tensor.item") == ".detach()"
    assert cure(Kind.READ, "Tensor.item", "x = y.item()", place=("<string>", 3)).endswith(LATER)
    assert cure(Kind.READ, "Tensor.item", "for v in x.item():") == Kind.READ.cure_in("torch")
    assert cure(Kind.READ, "Tensor.item", "", place=("<string>", 3)) == Kind.READ.cure_in("torch")
    scaler = cure(Kind.READ, "Tensor.item", "scaler.step(optimizer)", "torch/amp/grad_scaler.py")
    assert "fused=True" in scaler
    assert Kind.READ.cure_in("torch") in cure(Kind.READ, "Tensor.item", "x = y.item()", "lib.py")


LOOP = "for step in range(3):\n    loss = (x * step).sum()\n    {}\n"
# Programs whose line {} reads: what stands before and after the loop, and whether the line can keep its value there.
PROGRAMS = [
    ("clipfracs = []", "clipfracs += [loss.item()]", "print(np.mean(clipfracs))", False),
    ("run = 0.0", "run += loss.item()", "print(round(run, 5))", False),
    ("run = 0.0", "run += loss.item(); bar.set_postfix(loss=run)", "", False),
    ("hist = []", "hist.append(loss.item())", "print(round(sum(hist)))", False),
    ("hist = []", "hist.append(loss.item())", "mean = sum(hist) / len(hist)\nprint(round(mean, 5))", False),
    ("hist = []", "hist.append(loss.item())", "json.dumps(hist)", False),
    ("losses = torch.zeros(3)", "losses[step] = loss.item()", "", False),
    ("run = np.zeros(1)", "run += loss.item()", "", False),
    ("run = 0.0", "print(run); run += loss.item()", "", False),
    ("run = 0.0", "run += loss.item()", "def shown():\n    return round(run, 5)", False),
    ("run = 0.0", "run += loss.item()", "class Shown:\n    value = run", False),
    ("run = 0.0\nold = []", "run += loss.item(); old.append(run)", "", False),
    ("hist = other = []", "hist.append(loss.item())", "", False),
    ("run = 0.0", "last = loss.item(); last += 1; run += last", "", False),
    ("from state import hist", "hist.append(loss.item())", "", False),
    ("run = 0.0", "run += loss.item()", "print(f'{run / 3:.3f}')", True),
    ("run = 0.0", "run += loss.item() * len(x)", "mean = run / 3\nprint(f'{mean:.3f}', float(run))", True),
    ("run, seen = 0.0, 0", "run += loss.item()", "seen += 1\nprint(f'{run / seen:.4f}')", True),
    ("run = 0.0", "run += loss.item()", "def other():\n    run = 1.0\n    return round(run)", True),
    ("hist = []", "hist.append(loss.item())", "print(f'{sum(hist) / len(hist):.3f} {hist[-1]:.2f}')", True),
    ("hist = []", "hist += [loss.item()]", "hist.clear()", True),
]


@pytest.mark.parametrize(("before", "line", "after", "stays"), PROGRAMS)
def test_a_line_of_code_is_given_only_where_all_later_uses_work(
    tmp_path: Path, before: str, line: str, after: str, stays: bool
) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"{before}\n{LOOP.format(line)}{after}\n")
    number = file.read_text().splitlines().index(f"    {line}") + 1
    made = cure(Kind.READ, "Tensor.item", line, place=(str(file), number))
    if not stays:
        assert made.endswith(LATER) or made.startswith(DECIDE), made
        return
    torch = pytest.importorskip("torch")
    assert made == line.replace(".item()", ".detach()")
    cured = f"{before}\n{LOOP.format(made)}{after}\n"
    outputs = []
    for program in (file.read_text(), cured):  # and it computes the same
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(program, {"x": torch.ones(4), "torch": torch})
        outputs.append(output.getvalue())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("line", "kind", "call"),
    [
        ("acc = correct.cpu() / len(y)", Kind.TO_HOST, "Tensor.cpu"),
        ("losses[k] = loss.detach()", Kind.TO_HOST, "Tensor.__setitem__"),
        ("env.step(a.item())", Kind.READ, "Tensor.item"),
        ("n = torch.zeros(k)", Kind.READ, "a tensor given for a number"),
    ],
)
def test_no_line_of_code_where_none_is_sure(tmp_path: Path, line: str, kind: Kind, call: str) -> None:
    with pytest.raises(SyntaxError):
        ast.parse(_cured(tmp_path, line, kind, call))


def test_code_and_words_are_on_lines_of_their_own(tmp_path: Path) -> None:
    code, words = _cured(tmp_path, "x = x.to(d)", Kind.TO_DEVICE, "Tensor.to").splitlines()
    assert code == "x = x.to(d, non_blocking=True)"
    assert words == "with pin_memory=True where x comes from (DataLoader, or x.pin_memory())"

"""Cures are right lines of their framework, or words where there is no such line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from manyhands.audit.cure import cure
from manyhands.audit.kinds import Kind

WORDS = ""  # no line of code can be the cure
RARELY = "if step % 100 == 0: "
# What a line is in a loop over `step`: what is called, its kind, its framework and its cure.
ITEM = (Kind.READ, "Tensor.item", "torch")
FLOAT = (Kind.READ, "Array.__float__", "jax")
TO = (Kind.TO_DEVICE, "Tensor.to", "torch")
LINES = [
    ("total += loss.item()", *ITEM, "total += loss.detach()"),
    ("return self._loss.item() / n", *ITEM, WORDS),
    ("self.total += loss.item()", *ITEM, "self.total += loss.detach()"),
    ("clipfracs += [loss.item()]", *ITEM, "clipfracs += [loss.detach()]"),
    ("losses[step] = loss.item()", *ITEM, WORDS),
    ("values = [v.detach().cpu().item() for v in y[0]]", *ITEM, "values = [v.detach() for v in y[0]]"),
    ("größe = (a + b).item()  # läuft", *ITEM, "größe = (a + b).detach()"),
    ("meter.update(loss.item(), n=4)", *ITEM, WORDS),
    ("row = -y.min().item() + x[0].item() * 2", *ITEM, "row = -y.min().detach() + x[0].detach().clone() * 2"),
    ("row = {'a': y.min().item()}", *ITEM, WORDS),
    ("rate = max(0.1, loss.item())", *ITEM, WORDS),
    ("if (top := loss.item()) > 3: best = top", *ITEM, WORDS),
    ("v = loss.item(); best = v if v < best else best", *ITEM, WORDS),
    ("m = np.mean([loss.item(), 2.0])", *ITEM, WORDS),
    ("text = '%.3f' % loss.item()", *ITEM, WORDS),
    ("text = f'{loss.item():.3f}'", *ITEM, WORDS),
    ("x = table[loss.item()]", *ITEM, WORDS),
    ("s, r = env.step(a.item())", *ITEM, WORDS),
    ("run.log({'loss': loss.item()})", *ITEM, RARELY + "run.log({'loss': loss.item()})"),
    ("print(f'{loss.item():.3f}')", *ITEM, RARELY + "print(f'{loss.item():.3f}')"),
    ("n = int(x.sum())", Kind.READ, "Tensor.__int__", "torch", "n = x.sum().detach().long()"),
    ("n = int(tf.sum(x))", Kind.READ, "Tensor.__int__", "tensorflow", "n = tf.cast(tf.sum(x), tf.int64)"),
    ("a.append(float(x + y))", Kind.READ, "Tensor.__float__", "torch", "a.append((x + y).detach())"),
    ("a.append(float(x + y))", *FLOAT, "a.append(x + y)"),
    ("b = 2 * float(x + y)", *FLOAT, "b = 2 * (x + y)"),
    ("row = [float(v) for v in values]", *FLOAT, WORDS),  # some may be plain numbers
    ("n = torch.zeros(k)", Kind.READ, "a tensor given for a number", "torch", WORDS),
    ("last = pred[i, n - 1]", Kind.READ, "Tensor.__getitem__", "torch", WORDS),
    ("last = loss.asscalar()", Kind.READ, "NDArray.asscalar", "mxnet", "last = loss.detach()"),
    ("total += loss.numpy()", Kind.TO_HOST, "Tensor.numpy", "tensorflow", "total += loss"),
    ("w = np.asarray(weights)", Kind.TO_HOST, "numpy.asarray", "jax", "w = weights"),
    ("w = np.asarray(weights, dtype=int)", Kind.TO_HOST, "numpy.asarray", "jax", WORDS),
    ("a.append(loss.asnumpy())", Kind.TO_HOST, "NDArray.asnumpy", "mxnet", "a.append(loss.copy())"),
    ("v = loss.cpu().item()", Kind.TO_HOST, "Tensor.cpu", "torch", "v = loss.detach()"),
    ("acc = correct.cpu() / len(y)", Kind.TO_HOST, "Tensor.cpu", "torch", WORDS),
    ("losses[k] = loss.detach()", Kind.TO_HOST, "Tensor.__setitem__", "torch", WORDS),
    ("y = step(x).block_until_ready()", Kind.SYNCHRONIZE, "Array.block_until_ready", "jax", "y = step(x)"),
    ("y = jax.block_until_ready(f(x))", Kind.SYNCHRONIZE, "jax.block_until_ready", "jax", "y = f(x)"),
    ("x, y = x.to(dev), y.to(f(dev))", Kind.BLOCKING, "Tensor.to", "torch",
     "x, y = x.to(dev, non_blocking=True), y.to(f(dev), non_blocking=True)"),
    ("x = torch.ones(4).to(dev)", *TO, WORDS),
    ("x = x.to(d, non_blocking=True)", *TO, WORDS),
    ("r = torch.tensor(values, device=d)", Kind.DATA, "torch.tensor", "torch", WORDS),
    ("x[0, 1] = -2.5", Kind.DATA, "Tensor.__setitem__", "torch", "x[0, 1].fill_(-2.5)"),
    ("s = x[y == 1].sum()", Kind.SHAPE, "Tensor.__getitem__", "torch", WORDS),
    ("d = torch.linalg.eigh(a)", Kind.CHECK, "torch.linalg.eigh", "torch", WORDS),
]  # fmt: skip


def _cured(tmp_path: Path, line: str, kind: Kind, call: str, framework: str = "torch", loop: str = "") -> str:
    file = tmp_path / f"train_{abs(hash((line, loop)))}.py"
    file.write_text(f"def f():\n    {loop or 'for step, batch in tqdm(enumerate(data)):'}\n        {line}\n")
    return cure(kind, call, line.partition("  #")[0], framework=framework, place=(str(file), 3))


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize(("line", "kind", "call", "framework", "expected"), LINES, ids=[line for line, *_ in LINES])
def test_a_cure_is_code_only_where_it_computes_the_same(
    tmp_path: Path, line: str, kind: Kind, call: str, framework: str, expected: str
) -> None:
    made = _cured(tmp_path, line, kind, call, framework)
    assert made
    assert _is_code(made.splitlines()[0]) == bool(expected), made
    assert not expected or made.splitlines()[0] == expected
    stays = ".item()" in line or kind in (Kind.READ, Kind.TO_HOST)
    assert ("after the loop, not in it" in made) == (stays and bool(expected) and not expected.startswith(RARELY))


def test_who_counts_the_steps_is_known_or_not(tmp_path: Path) -> None:
    for loop, begin in (
        ("for i in range(9):", "if i % 100"),
        ("for n, x in enumerate(tqdm(data)):", "if n % 100"),
        ("for x in data:", "count the steps, and run this line every 100"),
    ):
        assert _cured(tmp_path, "print(loss)", Kind.PRINT, "Tensor.__repr__", loop=loop).startswith(begin)
    rare = _cured(tmp_path, "print(loss)", Kind.PRINT, "Tensor.__repr__", loop="if step % 50 == 0:")
    assert rare == Kind.PRINT.cure_in("torch")


def test_words_name_what_the_line_calls(tmp_path: Path) -> None:
    for line, kind, call, words in (
        ("m = np.mean([loss.item(), 2.0])", Kind.READ, "Tensor.item", "mean() needs the value"),
        ("p = pack(x, n.cpu().numpy())", Kind.TO_HOST, "Tensor.cpu", "pack() needs the value"),
        ("rate = max(0.1, loss.item())", Kind.READ, "Tensor.item", "decide on the device"),
        ("h = F.one_hot(y)", Kind.SHAPE, "one_hot", "num_classes"),
        ("a = f(torch.from_numpy(b).to(d))", Kind.TO_DEVICE, "Tensor.to", ".pin_memory() before the copy"),
        ("x = torch.ones(4).to(d)", Kind.TO_DEVICE, "Tensor.to", "torch.ones(..., device=...)"),
        ("torch.distributed.barrier()", Kind.COLLECTIVE, "torch.distributed.barrier", "remove this line"),
    ):
        assert words in _cured(tmp_path, line, kind, call)


def test_libraries_that_are_known_have_cures_of_their_own() -> None:
    for library, kind, setting in (
        ("/site-packages/torch/distributions/distribution.py", Kind.CONTROL_FLOW, "validate_args=False"),
        ("/torch/amp/grad_scaler.py", Kind.READ, "fused=True"),
        ("C:\\site-packages\\transformers\\trainer.py", Kind.CONTROL_FLOW, "logging_nan_inf_filter=False"),
        ("C:\\site-packages\\transformers\\trainer.py", Kind.READ, "logging_steps"),
        ("/accelerate/utils/operations.py", Kind.BLOCKING, "non_blocking=True"),
        ("/accelerate/utils/operations.py", Kind.TO_HOST, "the library's code"),
        ("/torch/optim/lbfgs.py", Kind.READ, "the library's code"),
    ):
        assert setting in cure(kind, "Tensor.item", "o.step(f)", library)


def test_a_statement_of_several_lines_and_code_without_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("both = round(\n    y.item())\nz = (\n    y\n    .item()\n)\n")
    assert "round()" in cure(Kind.READ, "Tensor.item", "y.item())", place=(str(file), 2))
    for code in ("return y.item()", "for v in x.item():", ""):
        assert cure(Kind.READ, "Tensor.item", code, place=("<string>", 3)) == Kind.READ.cure_in("torch")


def test_code_and_words_are_on_lines_of_their_own(tmp_path: Path) -> None:
    code, words = _cured(tmp_path, "x = x.to(d)", Kind.TO_DEVICE, "Tensor.to").splitlines()
    assert code == "x = x.to(d, non_blocking=True)"
    assert words == "with pin_memory=True where x comes from (DataLoader, or x.pin_memory())"

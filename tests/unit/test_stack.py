"""Layers and products as one kernel: right within rounding, and a row's bits are its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from eagle2.models import stack as module
from eagle2.models.checkpoint import TargetConfig, load_tensors
from eagle2.models.fused import best_columns, best_outputs, row_linear
from eagle2.models.stack import BlockLinear, can_stack
from eagle2.models.target import TargetModel
from eagle2.models.tiny import write_tiny_target
from tests.pooled import Nodes, Pooled, Span

DTYPES = [torch.float32, torch.bfloat16]
# (outputs, inputs): whole blocks, a part of one, a single output.
SHAPES = [(960, 576), (576, 1536), (130, 64), (1, 32)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def needs(dtype: torch.dtype) -> None:
    if not can_stack(dtype):
        pytest.skip(f"this CPU has no instructions for {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_right_and_rows_do_not_depend_on_each_other(
    outputs: int, inputs: int, dtype: torch.dtype, biased: bool
) -> None:
    needs(dtype)
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    linear = BlockLinear(weight, bias)
    x = torch.randn(100, inputs, generator=generator).to(dtype)
    expected = linear(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(expected.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    order = torch.randperm(100, generator=generator)
    assert torch.equal(linear(x[order]), expected[order])
    for rows in range(1, 101):
        assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows"
    x[[0, 50, 99]] = torch.nan
    kept = [i for i in range(100) if i not in (0, 50, 99)]
    result = linear(x)
    assert result[[0, 50, 99]].isnan().all()
    assert torch.equal(result[kept], expected[kept])


def test_sums_of_bfloat16_can_be_had_as_float32() -> None:
    needs(torch.bfloat16)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    wide = BlockLinear(weight, out_dtype=torch.float32)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), BlockLinear(weight)(x))
    torch.testing.assert_close(wide, x.float() @ weight.float().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("outputs", [130, 96, 33, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_the_best_output_is_what_the_sums_say(outputs: int, dtype: torch.dtype, biased: bool) -> None:
    needs(dtype)
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(130, 64, generator=generator).to(dtype)
    weight[97], weight[40], weight[31] = weight[3], weight[3], weight[9]  # ties, in one block and in several
    bias = torch.randn(130, generator=generator).to(dtype) if biased else None
    linear = BlockLinear(weight, bias, torch.float32)
    x = torch.randn(41, 64, generator=generator).to(dtype)
    x[:2] = weight[[3, 9]] * 4
    x[5], x[17], x[40] = torch.nan, torch.inf, 0
    expected = best_columns(linear(x)[:, :outputs])
    assert expected[5] == expected[17] == -1
    assert torch.equal(linear.best(x, outputs), expected)
    assert torch.equal(best_outputs(linear, x, outputs), expected)
    assert torch.equal(best_outputs(lambda x: linear(x), x, outputs), expected)
    for row in range(41):
        assert torch.equal(linear.best(x[row : row + 1], outputs), expected[row : row + 1])


def test_one_weight_that_is_no_number_is_seen_in_any_block() -> None:
    needs(torch.float32)
    for column in (0, 50, 129):
        weight = torch.ones(130, 64)
        weight[column, 7] = torch.nan
        linear = BlockLinear(weight)
        assert linear.best(torch.ones(1, 64), 130).tolist() == [-1]
        if column:
            assert linear.best(torch.ones(1, 64), column).tolist() == [0]


def test_what_does_not_fit_goes_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not BlockLinear.fits(torch.empty(8, 40))
    assert not BlockLinear.fits(torch.empty(8, 64, dtype=torch.float16))
    assert not BlockLinear.fits(torch.empty(8, 64, device="meta"))
    monkeypatch.setattr(module, "can_stack", lambda dtype: False)
    weight, x = torch.randn(8, 64), torch.randn(3, 64)
    torch.testing.assert_close(row_linear(weight)(x), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_one_kernel_gives_what_the_operators_give(
    architecture: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(dtype)
    folder = write_tiny_target(tmp_path / "target", architecture=architecture, num_layers=3, tokenizer=False)
    config, weights = TargetConfig.from_folder(folder), load_tensors(folder)
    results = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(module, "can_stack", lambda dtype: False)
        model = TargetModel(config, weights, dtype=dtype)
        assert (model._stack is not None) == fused
        pooled = Pooled(model)
        (table,) = pooled.start(list(range(5, 75)))
        tree, prompt = pooled.forward(Nodes(table, [9, 8, 7, 6], [-1, 0, 0, 2]), Span(pooled.table(), [4, 5, 6]))
        results.append(torch.cat([model.logits(tree), model.logits(prompt)]))
    one, operators = results
    spread = operators.std()
    assert (one - operators).abs().max() < (1e-4 if dtype == torch.float32 else 0.1) * spread


def test_kernels_from_two_threads_at_once_do_not_mix() -> None:
    needs(torch.float32)
    linear, x = BlockLinear(torch.randn(640, 2048)), torch.randn(8, 2048)
    expected, wrong = linear(x), []

    def repeat() -> None:
        wrong.extend(i for i in range(20) if not torch.equal(linear(x), expected))

    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong

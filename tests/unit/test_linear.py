"""Linear layers: right within rounding, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from eagle2.models import linear as module
from eagle2.models.layers import common_tiles, padded_rows
from eagle2.models.linear import Linear, packs, row_plan

DTYPES = [torch.float32, torch.bfloat16]
# (outputs, inputs): sizes of the embedded model, of its head, odd ones and tiny ones.
SHAPES = [(960, 576), (576, 1536), (1536, 576), (576, 1152), (130, 67), (64, 64), (7, 3), (1, 5), (3, 1)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def needs(dtype: torch.dtype) -> None:
    if not packs(torch.empty(2, 2, dtype=dtype)):
        pytest.skip(f"this CPU has no instructions for {dtype}")


def layer(outputs: int, inputs: int, dtype: torch.dtype, biased: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    return weight, torch.randn(outputs, generator=generator).to(dtype) if biased else None


tile_sets = st.sets(st.integers(1, 64), min_size=1).map(lambda tiles: tuple(sorted(tiles)))


@settings(deadline=None)
@given(rows=st.integers(1, 500), tiles=tile_sets)
def test_a_plan_covers_the_rows_with_tiles_alone(rows: int, tiles: tuple[int, ...]) -> None:
    plan = row_plan(rows, tiles)
    assert set(plan) <= set(tiles)
    assert sum(plan[:-1]) < rows <= sum(plan)
    # No smaller tile at the end would do.
    rest = rows - sum(plan[:-1])
    assert plan[-1] == min(tile for tile in tiles if tile >= rest)
    # Padding once to the plan's size needs no further padding.
    assert sum(row_plan(sum(plan), tiles)) == sum(plan)


@settings(deadline=None)
@given(rows=st.integers(1, 200), sets=st.lists(tile_sets, min_size=1, max_size=4))
def test_rows_padded_for_all_layers_suit_each(rows: int, sets: list[tuple[int, ...]]) -> None:
    linears = []
    for tiles in sets:
        linear = Linear.__new__(Linear)
        linear.tiles = tuple(sorted({*tiles, 32}))
        linears.append(linear)
    padded = padded_rows(rows, common_tiles(tuple(linears)))
    assert padded >= rows
    assert all(set(row_plan(padded, common_tiles(tuple(linears)) or ())) <= set(one.tiles or ()) for one in linears)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_do_not_depend_on_each_other(outputs: int, inputs: int, dtype: torch.dtype, biased: bool) -> None:
    needs(dtype)
    weight, bias = layer(outputs, inputs, dtype, biased)
    linear = Linear(weight, bias)
    assert linear.tiles is not None
    x = torch.randn(100, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    # Every row at another place among 32, beside other rows.
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    expected = torch.empty(100, outputs, dtype=dtype)
    for part in order.split(32):
        places = F.pad(part, (0, 32 - len(part)))
        expected[part] = linear(x[places])[: len(part)]
    for rows in range(1, 101):
        assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows"
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(expected.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_neighbours_that_are_not_numbers_change_nothing(dtype: torch.dtype) -> None:
    needs(dtype)
    linear = Linear(*layer(576, 1536, dtype, True))
    x = torch.randn(9, 1536, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = linear(x)
    x[[0, 4, 8]] = torch.nan
    result = linear(x)
    assert result[[0, 4, 8]].isnan().all()
    kept = [1, 2, 3, 5, 6, 7]
    assert torch.equal(result[kept], expected[kept])


@pytest.mark.parametrize("biased", [False, True])
def test_without_packed_weights_it_is_torch(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "packs", lambda weight: False)
    weight, bias = layer(12, 20, torch.float32, biased)
    linear = Linear(weight.t().contiguous().t(), bias)
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    assert linear.tiles is None
    assert torch.equal(linear(x), F.linear(x, weight, bias))
    assert common_tiles((linear,)) is None
    assert padded_rows(5, None) == 5


def test_what_packs() -> None:
    assert not packs(torch.empty(2, 2, dtype=torch.float16))
    assert not packs(torch.empty(2, 2, device="meta"))
    assert packs(torch.empty(2, 2)) == torch.backends.mkldnn.is_available()

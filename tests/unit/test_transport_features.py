"""Features cross a pair by value, whatever their dtype and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eagle2.transport.features import FeatureRangeError, features_as
from eagle2.transport.frames import FrameKind
from eagle2.transport.wire import decode_step, encode_step
from fakes.frames import DTYPES, body_of, entry_of, same_bits, step_of, through_wire


@pytest.mark.parametrize(
    "values", [[1.0, -2.5, 300.0, 70000.0], [0.0, -0.0, 6.1e-5, 65519.0], [-3.5e4, 2.0, 1e-3, 512.0]]
)
@pytest.mark.parametrize("receiver", DTYPES)
@pytest.mark.parametrize("sender", DTYPES)
def test_features_arrive_by_value(sender: torch.dtype, receiver: torch.dtype, values: list[float]) -> None:
    sent = torch.tensor([values], dtype=torch.float64).to(sender)
    received = through_wire(sent)
    assert received.dtype == sender
    assert same_bits(received, sent)
    overflows = sent.isfinite() & sent.to(receiver).isinf()
    if bool(overflows.any()):
        with pytest.raises(FeatureRangeError, match=r"does not fit torch\.float16"):
            features_as(received, receiver)
        return
    converted = features_as(received, receiver)
    assert converted.dtype == receiver
    # one bf16 step is 2**-8 of the value; fp16 loses an absolute 6e-8 near zero
    torch.testing.assert_close(converted.double(), sent.double(), rtol=2**-8, atol=6e-8)


@pytest.mark.parametrize("value", [70000.0, -70000.0, 1e30, 65520.0])
def test_overflow_is_named_and_never_becomes_infinite(value: float) -> None:
    features = through_wire(torch.tensor([[1.0, -2.5], [300.0, value]], dtype=torch.float32))
    with pytest.raises(FeatureRangeError, match=r"a feature of magnitude .* does not fit torch\.float16, .* 65504"):
        features_as(features, torch.float16)


def test_bfloat16_overflow_of_float32_is_refused() -> None:
    with pytest.raises(FeatureRangeError, match="bfloat16"):
        features_as(torch.tensor([3.4e38]), torch.bfloat16)


def test_what_is_no_number_already_passes_on() -> None:
    features = through_wire(torch.tensor([[float("nan"), float("inf")], [-float("inf"), 3.0]]))
    converted = features_as(features, torch.float16)
    assert converted.isnan().tolist() == [[True, False], [False, False]]
    assert converted.isinf().tolist() == [[False, True], [True, False]]


def test_same_dtype_is_no_copy_and_integers_are_refused() -> None:
    features = torch.ones(2, 3, dtype=torch.bfloat16)
    assert features_as(features, torch.bfloat16) is features
    with pytest.raises(ValueError, match=r"not torch\.int16"):
        features_as(features.view(torch.int16), torch.float16)


def test_a_nan_row_leaves_its_neighbours_alone() -> None:
    rows = torch.randn(4, 1, 8)
    rows[2] = float("nan")
    step = step_of(*(entry_of(rows[index], sequence=index) for index in range(4)))
    found = decode_step(body_of(encode_step(step), FrameKind.STEP)).entries
    assert [bool(entry.features.isfinite().all()) for entry in found] == [True, True, False, True]
    assert all(same_bits(found[index].features, rows[index]) for index in (0, 1, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[:12].view(3, 4).t(),
        lambda base: base.view(6, 10)[::2, 1:9:3],
        lambda base: base[:5].expand(3, 5),
        lambda base: base.as_strided((1, 3), (7, 3)),
        lambda base: base.as_strided((3, 1), (1, 5)),
        lambda base: base.as_strided((1, 1), (9, 9)),
    ],
    ids=["transposed", "strided", "expanded", "one-row", "one-column", "one-number"],
)
def test_non_contiguous_features(view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    sent = view(torch.arange(60.0).to(dtype))
    assert through_wire(sent).tolist() == sent.tolist()


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_length_features(shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = through_wire(torch.empty(shape, dtype=dtype))
    assert (found.shape, found.dtype) == (shape, dtype)


def test_gradients_do_not_hinder() -> None:
    features = torch.ones(2, 3, requires_grad=True)
    found = through_wire(features)
    assert not found.requires_grad
    assert found.tolist() == [[1.0] * 3] * 2


def test_contiguous_features_are_sent_from_their_own_memory() -> None:
    features = torch.zeros(3, 8, dtype=torch.bfloat16)
    frame = encode_step(step_of(entry_of(features)))
    features[1, 2] = 5.0
    assert decode_step(body_of(frame, FrameKind.STEP)).entries[0].features[1, 2] == 5.0

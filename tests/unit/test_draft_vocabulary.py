"""The table of frequencies that lies with a head: its order, its file, what is refused, what of it is scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle2.errors import ConfigError, ModelError
from eagle2.models.draft_vocabulary import DEFAULT_SIZE, TABLE_NAME, DraftVocabulary, scored_ids
from eagle2.models.embedded import embedded_head


def table(*counts: int) -> DraftVocabulary:
    return DraftVocabulary.from_counts(torch.tensor(counts))


def write(folder: Path, ids: list[int], counts: list[int]) -> None:
    tensors = {"token_ids": torch.tensor(ids, dtype=torch.int32), "counts": torch.tensor(counts, dtype=torch.int64)}
    save_file(tensors, folder / TABLE_NAME)


def test_descending_ties_by_id_zeros_left_out() -> None:
    built = table(2, 0, 5, 2, 9, 0, 2)
    assert built.token_ids.tolist() == [4, 2, 0, 3, 6]
    assert built.counts.tolist() == [9, 5, 2, 2, 2]
    assert (built.token_ids.dtype, built.counts.dtype) == (torch.int32, torch.int64)
    assert DraftVocabulary.from_counts(torch.tensor([2, 0, 5, 1]), at_least=2).token_ids.tolist() == [2, 0]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60).filter(any),
    st.integers(1, 70),
    st.sets(st.integers(0, 59), max_size=9),
)
def test_the_most_frequent_are_those_that_no_other_beats(counts: list[int], n: int, always: set[int]) -> None:
    ids = table(*counts).most_frequent(n, always).tolist()
    assert ids == sorted(set(ids))
    assert always <= set(ids)
    counted = {i for i, count in enumerate(counts) if count}
    assert len(ids) == max(len(always), min(n, len(counted | always)))
    others = set(ids) - always
    for left_out in counted - set(ids):
        assert all((counts[i], -i) > (counts[left_out], -left_out) for i in others)


def test_coverage_is_the_share_of_the_text() -> None:
    assert table(1, 0, 5, 2).coverage(torch.tensor([1, 2])) == 5 / 8


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    built = table(3, 0, 7, 7)
    built.save(tmp_path)
    loaded = DraftVocabulary.load(tmp_path, 4)
    assert loaded is not None
    assert torch.equal(loaded.token_ids, built.token_ids)
    assert torch.equal(loaded.counts, built.counts)


def test_whoever_may_read_files_made_here_may_read_the_table(tmp_path: Path) -> None:
    DraftVocabulary.from_counts(torch.tensor([3, 1])).save(tmp_path)
    (tmp_path / "other").touch()
    assert (tmp_path / TABLE_NAME).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_no_file_is_no_table(tmp_path: Path) -> None:
    assert DraftVocabulary.load(tmp_path, 4) is None


@pytest.mark.parametrize(
    ("ids", "counts", "sentence"),
    [
        ([1, 320], [5, 3], r"the token id 320 is outside the target's vocabulary of 320 tokens"),
        ([1, -1], [5, 3], r"the token id -1 is outside"),
        ([1, 2, 1], [5, 4, 3], r"the token id 1 stands there more than once"),
        ([1, 2, 3], [5, 3, 4], r"its counts are not descending: 3 in row 1, then 4"),
        ([1, 2], [5, 0], r"the token id 2 has the count 0, less than 1"),
        ([1, 2], [5], r"it has 2 token ids and 1 counts"),
        ([], [], r"it has 0 token ids and 0 counts"),
    ],
)
def test_a_broken_table_is_refused(ids: list[int], counts: list[int], sentence: str, tmp_path: Path) -> None:
    write(tmp_path, ids, counts)
    with pytest.raises(ModelError, match=f"{TABLE_NAME}: {sentence}"):
        DraftVocabulary.load(tmp_path, 320)


def test_other_dtypes_and_shapes_are_refused(tmp_path: Path) -> None:
    ids, counts = torch.tensor([1], dtype=torch.int32), torch.tensor([1])
    save_file({"token_ids": ids.float(), "counts": counts}, tmp_path / TABLE_NAME)
    with pytest.raises(ModelError, match=r"token_ids must be torch\.int32 of one dimension, not torch\.float32"):
        DraftVocabulary.load(tmp_path, 4)
    save_file({"token_ids": ids, "counts": counts[None]}, tmp_path / TABLE_NAME)
    with pytest.raises(ModelError, match=r"counts must be torch\.int64 of one dimension, not .* shape \(1, 1\)"):
        DraftVocabulary.load(tmp_path, 4)
    save_file({"token_ids": ids}, tmp_path / TABLE_NAME)
    with pytest.raises(ModelError, match="has no tensor counts"):
        DraftVocabulary.load(tmp_path, 4)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    table(1, 2, 3).save(tmp_path)
    path = tmp_path / TABLE_NAME
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelError, match=rf"{TABLE_NAME} cannot be read, it may be cut off"):
        DraftVocabulary.load(tmp_path, 4)


def test_a_number_takes_what_there_is_and_the_end_tokens(tmp_path: Path) -> None:
    built = table(1, 4, 0, 2)

    def ids(size: int) -> list[int] | None:
        chosen = scored_ids(size, built, tmp_path, (2,))
        return None if chosen is None else chosen.tolist()

    assert ids(1) == [2]
    assert ids(2) == [1, 2]
    assert ids(3) == [1, 2, 3]
    assert ids(1000) == [0, 1, 2, 3]


def test_auto_asks_for_a_table_that_is_long_enough(tmp_path: Path) -> None:
    long = DraftVocabulary.from_counts(torch.arange(DEFAULT_SIZE + 1).flip(0) + 1)
    chosen = scored_ids("auto", long, tmp_path, (DEFAULT_SIZE,))
    assert chosen is not None
    assert chosen.tolist() == [*range(DEFAULT_SIZE - 1), DEFAULT_SIZE]
    assert scored_ids("auto", table(1, 2, 3), tmp_path, ()) is None
    assert scored_ids("auto", None, tmp_path, ()) is None
    assert scored_ids("all", long, tmp_path, ()) is None
    assert scored_ids("all", None, tmp_path, ()) is None


def test_a_number_without_a_table_names_number_and_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"draft_vocabulary is 4096, .*{tmp_path / TABLE_NAME} is not there"):
        scored_ids(4096, None, tmp_path, ())


def test_the_embedded_head_has_a_table() -> None:
    shipped = DraftVocabulary.load(embedded_head(), 49152)
    assert shipped is not None
    assert len(shipped) >= DEFAULT_SIZE
    chosen = scored_ids("auto", shipped, embedded_head(), (2,))
    assert chosen is not None
    assert shipped.coverage(chosen) > 0.95

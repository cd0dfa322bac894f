"""The questions of a measurement: where they come from and which are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle2.errors import ConfigError
from eagle2.evaluation import questions as module
from eagle2.evaluation.questions import (
    DATA,
    TASKS,
    Question,
    built_in_questions,
    default_questions,
    find_tasks,
    read_questions,
    select,
)


def test_the_built_in_questions_are_eight_of_eight_kinds() -> None:
    questions = built_in_questions().questions
    assert len(questions) == len({q.category for q in questions}) == len({q.name for q in questions}) == 8


def test_categories_are_taken_in_turn() -> None:
    kinds = (("a", 3), ("b", 1), ("c", 2))
    questions = [Question(f"{kind}{i}", kind, ("?",)) for kind, count in kinds for i in range(count)]
    assert [q.name for q in select(questions, 4)] == ["a0", "b0", "c0", "a1"]
    assert [q.name for q in select(questions, 99)] == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_all_turns_are_read_from_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"question_id": 7, "category": "math", "turns": ["1+1?", "2+2?"]}\n\n{"prompt": "Hello"}\n')
    found = read_questions(path)
    assert (found.task, found.source) == ("asked", "asked.jsonl")
    assert found.questions == (Question("asked/7", "math", ("1+1?", "2+2?")), Question("asked/3", "", ("Hello",)))
    assert found.limited(1).questions == found.questions[:1]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "has no questions"),
        ('{"prompt": "x"}\n{"question": "y"}\n', "Line 2 of .* is no question: it needs"),
        ("not json\n", "Line 1 of .* is no question: it needs"),
        ("[1]\n", "Line 1 of .* is no question: it needs"),
        ('{"turns": []}\n', r"Line 1 of .* is no question: its turns are \[\]"),
        ('{"turns": "x"}\n', "Line 1 of .* is no question: its turns are 'x'"),
        ('{"prompt": 5}\n', "Line 1 of .* is no question: its text is 5"),
        ('{"turns": ["x", ""]}\n', "Line 1 of .* is no question: its text is ''"),
        ('{"question_id": 1, "prompt": "x"}\n' * 2, "Line 2 of .* has the question_id of an earlier line"),
    ],
)
def test_a_file_that_has_none_is_refused_by_line(content: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        read_questions(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read"):
        read_questions(tmp_path / "nowhere.jsonl")


def _write(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": f"a question of {name}"}) + "\n")


def test_the_package_asks_its_own_questions_where_no_set_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DATA", tmp_path)
    assert default_questions() == built_in_questions()
    tasks, remarks = find_tasks("all", None)
    assert tasks == [built_in_questions()]
    assert remarks == [f"{tmp_path} has no question sets: the eight questions of the package are asked."]
    _write(tmp_path, "mt_bench", "qa")
    assert default_questions().source == "mt_bench.jsonl"
    tasks, remarks = find_tasks("all", None)
    assert [task.task for task in tasks] == ["mt_bench", "qa"]
    assert remarks[0] == f"humaneval is left out: humaneval.jsonl is not in {tmp_path}."
    assert len(remarks) == 4


def test_tasks_that_are_named_must_be_there(tmp_path: Path) -> None:
    _write(tmp_path, "qa", "sum")
    tasks, remarks = find_tasks("sum, qa", tmp_path)
    assert ([task.task for task in tasks], remarks) == (["sum", "qa"], [])
    with pytest.raises(ConfigError, match=r"gsm8k\.jsonl is not in .*; name the folder that has it with --data"):
        find_tasks("qa,gsm8k", tmp_path)
    with pytest.raises(ConfigError, match=r"mt_bench\.jsonl is not in"):
        find_tasks("all", tmp_path)
    with pytest.raises(ConfigError, match="'QA' is no task; there are mt_bench, humaneval"):
        find_tasks("QA", tmp_path)
    with pytest.raises(ConfigError, match="The task qa is named twice"):
        find_tasks("qa,qa", tmp_path)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the question sets are not in {DATA}")
def test_the_papers_sets_are_read() -> None:
    tasks, remarks = find_tasks("all", None)
    assert remarks == []
    assert [task.task for task in tasks] == list(TASKS)
    assert all(len(task.questions) == 80 for task in tasks)
    assert {len(q.turns) for q in tasks[0].questions} == {2}
    assert {len(q.turns) for task in tasks[1:] for q in task.questions} == {1}
    assert len({q.category for q in tasks[0].limited(8).questions}) == 8

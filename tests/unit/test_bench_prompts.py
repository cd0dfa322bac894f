"""What is said becomes the ids that a model reads."""

from __future__ import annotations

import pytest

from eagle2.errors import ModelError
from eagle2.evaluation.prompts import PromptEncoder
from fakes.verifier import describe


def test_prompts_become_ids_as_the_http_api_makes_them() -> None:
    encoder = PromptEncoder(describe())
    assert bytes(encoder.chat("Hi", "Be kind")) == b"[system]Be kind\n[user]Hi\n[assistant]"
    assert encoder.raw("Hi") == (256, *b"Hi")


def test_a_conversation_alternates_between_user_and_model() -> None:
    encoder = PromptEncoder(describe())
    assert bytes(encoder.conversation(["Hi"])) == b"[user]Hi\n[assistant]"
    assert bytes(encoder.conversation(["Hi", "Ho", "And?"])) == b"[user]Hi\n[assistant]Ho\n[user]And?\n[assistant]"


def test_a_model_without_a_template_has_no_chat_and_reads_on() -> None:
    encoder = PromptEncoder(describe(chat_template=None))
    assert not encoder.has_template
    with pytest.raises(ModelError, match="'tiny/bytes' has no chat template"):
        encoder.chat("Hi")
    assert encoder.conversation(["Hi", "Ho", "And?"]) == (256, *b"Hi\nHo\nAnd?")

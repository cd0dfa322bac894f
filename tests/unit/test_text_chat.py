"""Chat templates: the same text as transformers renders, and rejections that become client errors."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from eagle2.errors import ModelError, RequestError
from eagle2.models.tiny import write_tiny_target
from eagle2.text.chat import ChatTemplate, special_tokens

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "你好 😀\n  two  spaces"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "the end"},
]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}\n",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}{% if add_generation_prompt %}>{% endif %}",
    "tools": "{% if tools is none %}no tools{% else %}tools{% endif %}{{ documents is none }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_transformers_does(name: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_target(tmp_path / "target")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATES[name]}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.from_folder(folder)
    assert ours is not None
    assert ours.render(MESSAGES, add_generation_prompt) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )


def test_the_tiny_template_writes_every_role(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(write_tiny_target(tmp_path / "target"))
    assert template is not None
    assert template.render(MESSAGES[:2]) == (
        "<|im_start|>system\nBe <brief> & 'kind'.<|im_end|>\n<|im_start|>user\n你好 😀\n  two  spaces<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_absent_tokens_are_written_as_nothing() -> None:
    assert ChatTemplate("[{{ bos_token }}{{ eos_token }}]").render([]) == "[]"


def test_today_is_written_in_the_asked_form() -> None:
    before = datetime.now().astimezone().strftime("%Y")
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) in (before, str(int(before) + 1))


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{{ messages[0]['content'] + '!' }}", [{"role": "user", "content": None}], "NoneType"),
        ("{{ messages[9].content.strip() }}", MESSAGES, "no element 9"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "append"),
    ],
)
def test_a_rejection_names_the_messages_field(source: str, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.param == "messages"
    assert caught.value.status == 400
    assert reason in caught.value.message


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template cannot be read"):
        ChatTemplate("{% for %}")


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config: dict[str, Any] = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path) is None
    assert special_tokens(tmp_path) == ("<s>", "</s>")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}default"}]
    path.write_text(json.dumps({**config, "chat_template": named}))
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None
    assert found.render([]) == "<s>default"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    found = ChatTemplate.from_folder(tmp_path)
    assert found is not None
    assert (found.source, found.bos_token, found.eos_token) == ("file {{ eos_token }}", "<s>", "</s>")
    assert found.render([]) == "file </s>"


def test_an_unreadable_tokenizer_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        ChatTemplate.from_folder(tmp_path)

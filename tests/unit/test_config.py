"""Settings are parsed once: precedence, refusals by name, round trip."""

from __future__ import annotations

import pytest

from eagle2.config import EngineSettings, PairSettings, Settings, load_settings
from eagle2.errors import ConfigError


def test_defaults_serve_the_embedded_model_on_the_loopback() -> None:
    settings = load_settings()
    assert settings == Settings()
    assert (settings.model.target, settings.model.draft) == ("embedded", "embedded")
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 8000)


def test_flags_win_over_environment_over_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE2_ENGINE__DEPTH", "6")
    monkeypatch.setenv("EAGLE2_ENGINE__TOP_K", "7")
    file = {"engine": {"depth": 3, "top_k": 3, "max_sequences": 3}}
    engine = load_settings(file, flags={"engine": {"depth": 5}}, environ=True).engine
    assert (engine.depth, engine.top_k, engine.max_sequences) == (5, 7, 3)


def test_the_environment_is_read_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE2_ENGINE__DEPTH", "6")
    assert load_settings().engine == EngineSettings()


@pytest.mark.parametrize(("given", "value"), [("4096", 4096), (4096, 4096), ("all", "all"), ("auto", "auto")])
def test_a_vocabulary_is_a_number_or_a_word(given: object, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(flags={"model": {"draft_vocabulary": given}}).model.draft_vocabulary == value
    monkeypatch.setenv("EAGLE2_MODEL__DRAFT_VOCABULARY", str(given))
    settings = load_settings(environ=True)
    assert settings.model.draft_vocabulary == value
    assert load_settings(settings.as_dict()) == settings


def test_settings_survive_the_way_through_plain_values() -> None:
    settings = load_settings({"model": {"draft": None, "dtype": "float32"}, "pair": {"socket_dir": "/run/pairs"}})
    assert load_settings(settings.as_dict()) == settings


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine": {"max_sequence": 4}}, r"engine\.max_sequence is not a setting.*max_sequences"),
        ({"engines": {}}, r"engines is not a setting; known here are model, engine, pair, http"),
        ({"engine": {"depth": 0}}, r"depth must be at least 1, not 0"),
        ({"engine": {"kv_slots": 3}}, r"kv_slots must be at least 16, not 3"),
        ({"engine": {"depth": "deep"}}, r"engine\.depth cannot be 'deep'"),
        ({"engine": {"tree_budget": "clever"}}, r"engine\.tree_budget cannot be 'clever': .*'fixed' or 'adaptive'"),
        ({"model": {"dtype": "int8"}}, r"model\.dtype cannot be 'int8'"),
        ({"model": {"target": ""}}, r"target must name a model"),
        ({"model": {"draft_vocabulary": 0}}, r"draft_vocabulary must be at least 1, not 0"),
        (
            {"model": {"draft_vocabulary": "most"}},
            r"model\.draft_vocabulary cannot be 'most': .*integer.*'auto' or",
        ),
        ({"http": {"port": 70000}}, r"port must lie between 1 and 65535, not 70000"),
        ({"pair": {"socket_dir": "/" + "d" * 90}}, r"socket_dir must be at most 75 bytes"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_settings(values)


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE2_ENGIN__DEPTH", "6")
    with pytest.raises(ConfigError, match="EAGLE2_ENGIN__DEPTH"):
        load_settings(environ=True)


def test_a_misspelt_name_in_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE2_ENGINE__DEPHT", "6")
    with pytest.raises(ConfigError, match="depht"):
        load_settings(environ=True)


def test_rules_hold_without_the_edge() -> None:
    with pytest.raises(ConfigError, match="retry_s must be at least"):
        PairSettings(retry_s=0)

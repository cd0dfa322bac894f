"""The Serve config that is deployed: the shipped one, with flags and environment in it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from eagle2.cli import main
from eagle2.errors import ConfigError
from eagle2.operations.serve_command import read_config, settings_of, with_counts, with_settings


def test_the_shipped_config_is_a_serve_config_on_the_loopback(tmp_path: Path) -> None:
    document = read_config(None)
    schema = ServeDeploySchema.model_validate(with_settings(document, settings_of(document, {}), tmp_path))
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 8000)
    assert schema.applications[0].import_path == "eagle2.app:build"
    assert [d.name for d in schema.applications[0].deployments] == ["Router", "TargetVerifier", "DraftProposer"]


def test_the_shipped_args_hold_only_known_settings() -> None:
    assert settings_of(read_config(None), {}).model.target == "embedded"


def test_flags_reach_both_args_and_http_options(tmp_path: Path) -> None:
    document = read_config(None)
    settings = settings_of(document, {"http": {"port": 8123}, "engine": {"depth": 2}})
    config = with_settings(document, settings, tmp_path)
    assert config["http_options"]["port"] == 8123
    assert config["applications"][0]["args"]["engine"]["depth"] == 2
    assert config["applications"][0]["args"]["pair"]["socket_dir"] == str(tmp_path / "pairs")
    assert document["http_options"]["port"] == 8000, "the document that was read is left as it was"


def test_http_options_of_a_file_are_taken_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "http_options: {host: 0.0.0.0, port: 9001}\n"
        "applications: [{import_path: eagle2.app:build, args: {engine: {top_k: 3}}}]\n"
    )
    document = read_config(file)
    assert settings_of(document, {}).http.port == 9001
    settings = settings_of(document, {"http": {"port": 9002}})
    assert (settings.http.host, settings.http.port, settings.engine.top_k) == ("0.0.0.0", 9002, 3)


def test_without_a_draft_no_proposer_is_deployed(tmp_path: Path) -> None:
    document = read_config(None)
    config = with_settings(document, settings_of(document, {"model": {"draft": None}}), tmp_path)
    assert [d["name"] for d in config["applications"][0]["deployments"]] == ["Router", "TargetVerifier"]


def test_pairs_and_routers_are_counted_apart(tmp_path: Path) -> None:
    shipped = read_config(None)
    document = with_counts(shipped, pairs=3, routers=None)
    schema = ServeDeploySchema.model_validate(with_settings(document, settings_of(document, {}), tmp_path))
    counts = {one.name: one.num_replicas for one in schema.applications[0].deployments}
    assert counts == {"Router": 1, "TargetVerifier": 3, "DraftProposer": 3}
    assert with_counts(shipped, pairs=None, routers=None) == shipped
    bare = with_counts({"applications": [{"name": "eagle2"}]}, pairs=None, routers=2)
    assert bare["applications"][0]["deployments"] == [{"name": "Router", "num_replicas": 2}]


def test_streams_leave_a_verifier_before_serve_ends_it() -> None:
    document = read_config(None)
    (verifier,) = [d for d in document["applications"][0]["deployments"] if d["name"] == "TargetVerifier"]
    assert settings_of(document, {}).routing.drain_s < verifier["graceful_shutdown_timeout_s"]


@pytest.mark.parametrize("text", ["applications: []", "- 1", "applications: [1]", "a: [", "applications: [{}, {}]"])
def test_what_is_no_serve_config_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml is not"):
        read_config(file)


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml cannot be read" in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err

"""``eagle2 serve``: a Serve config, with what flags and environment change in it, on a Ray of its own."""

from __future__ import annotations

import argparse
import copy
import importlib.resources
import logging
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import yaml

from eagle2.config import ENV_PREFIX, HttpSettings, Settings, load_settings
from eagle2.errors import ConfigError, ModelError
from eagle2.operations.argument_types import positive_int
from eagle2.operations.deployment_status import read_progress
from eagle2.operations.local_cluster import LocalCluster
from eagle2.operations.settings_flags import add_engine_flags, add_model_flags, given_settings
from eagle2.protocol import ModelDescription
from eagle2.router.tenants import KeyFile

_PROPOSER = "DraftProposer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 serve``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a Serve config; default: the one of the package")
    add_model_flags(parser)
    add_engine_flags(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that clients ask for")
    parser.add_argument("--host", help="the address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (default 8000)")
    parser.add_argument("--replicas", type=positive_int, metavar="N", help="pairs of verifier and proposer (default 1)")
    parser.add_argument("--routers", type=positive_int, metavar="N", help="routers side by side (default 1)")
    parser.add_argument("--store", metavar="URL", help="where routers keep sessions, as redis://HOST; default: memory")
    keys = "serve only those who have a key in it ('eagle2 keys new' makes them)"
    parser.add_argument("--keys-file", type=os.path.abspath, metavar="FILE", help=keys)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, which end it with status 0. Raises ``Eagle2Error`` when it cannot start."""
    _take_signals()
    logging.basicConfig(level=logging.WARNING, format="eagle2 serve: %(message)s")
    logging.getLogger("eagle2").setLevel(logging.INFO)
    try:
        document = with_counts(read_config(args.config), pairs=args.replicas, routers=args.routers)
        settings = settings_of(document, given_settings(args))
        KeyFile.of(settings.tenants)  # one that cannot be used is refused here, before Ray takes its time
        if (args.routers or 1) > 1 and settings.session.store.startswith("memory://"):
            _say("Routers without a common --store know nothing of each other's sessions and limits")
        _refuse_taken_port(settings.http)
        _prepare_model(settings)
        _say("Starting Ray")
        _unset_environment()
        with LocalCluster() as cluster:
            _take_signals()  # Ray put its own in place
            application = document["applications"][0]["name"]
            cluster.deploy(with_settings(document, settings, cluster.directory))
            _wait_until_ready(settings.http, application)
            _announce(settings.http, application)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        _say("Stopped")
        return 0


def read_config(path: Path | None) -> dict[str, Any]:
    """A Serve config with one application; the one that the package ships when ``path`` is None."""
    try:
        shipped = importlib.resources.files("eagle2") / "serve.yaml"
        document = yaml.safe_load(path.read_text() if path else shipped.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path} is not a Serve config with one application.")
    applications[0].setdefault("name", "eagle2")
    return cast(dict[str, Any], document)


def with_counts(document: Mapping[str, Any], *, pairs: int | None, routers: int | None) -> dict[str, Any]:
    """The config with so many replicas of each deployment; None leaves what it says."""
    counts = {"Router": routers, "TargetVerifier": pairs, _PROPOSER: pairs}
    config: dict[str, Any] = copy.deepcopy(dict(document))
    deployments = config["applications"][0].setdefault("deployments", [])
    for name, count in counts.items():
        if count is None:
            continue
        found = [deployment for deployment in deployments if deployment.get("name") == name]
        if not found:
            found = [{"name": name}]
            deployments += found
        found[0]["num_replicas"] = count
    return config


def settings_of(document: Mapping[str, Any], flags: Mapping[str, Any]) -> Settings:
    """What the config's ``args`` and ``http_options``, the environment and the flags set together."""
    options = document.get("http_options") or {}
    values = {**(document["applications"][0].get("args") or {})}
    values["http"] = {key: options[key] for key in ("host", "port") if key in options} | (values.get("http") or {})
    return load_settings(values, flags=flags, environ=True)


def with_settings(document: Mapping[str, Any], settings: Settings, directory: Path) -> dict[str, Any]:
    """The config to deploy: ``document`` with ``settings`` in it, sockets under ``directory``."""
    config: dict[str, Any] = copy.deepcopy(dict(document))
    config["http_options"] = {**(config.get("http_options") or {}), **settings.as_dict()["http"]}
    args = settings.as_dict()
    if args["pair"]["socket_dir"] is None:
        args["pair"]["socket_dir"] = str(directory / "pairs")
    application = config["applications"][0]
    application["args"] = args
    if settings.model.draft is None:
        deployments = application.get("deployments") or []
        application["deployments"] = [d for d in deployments if d.get("name") != _PROPOSER]
    return config


def _wait_until_ready(http: HttpSettings, application: str) -> None:
    from ray import serve

    said: tuple[str, ...] | None = None
    while True:
        progress = read_progress(serve.status(), application)
        if progress.failure is not None:
            raise ModelError(progress.failure)
        if progress.running != said and (progress.running or progress.waiting):
            said = progress.running
            _say(f"Running: {', '.join(said) or 'none'}; starting: {', '.join(progress.waiting) or 'none'}")
        if progress.running and not progress.waiting and _fetch(http, "/ready") is not None:
            return
        time.sleep(0.25)


def _announce(http: HttpSettings, application: str) -> None:
    from ray import serve

    verifier = serve.get_deployment_handle("TargetVerifier", application)
    model: ModelDescription = verifier.describe.remote().result(timeout_s=30)
    _say(f"Ready: {model.name} in {model.dtype} on {_url(http)} (Ctrl-C ends it)")


def _url(http: HttpSettings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(http.host, http.host)
    return f"http://{host}:{http.port}"


def _fetch(http: HttpSettings, path: str) -> bytes | None:
    try:
        with urllib.request.urlopen(_url(http) + path, timeout=10) as response:
            body: bytes = response.read()
            return body
    except (urllib.error.URLError, OSError):
        return None


def _refuse_taken_port(http: HttpSettings) -> None:
    """Serve reports a port in use only after minutes of retries."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((http.host, http.port))
        except OSError as error:
            raise ConfigError(f"{http.host}:{http.port} cannot be listened on: {error.strerror}.") from None


def _prepare_model(settings: Settings) -> None:
    """Convert or fetch once, here, where progress and refusals can be seen, and not in a replica with a time limit."""
    from eagle2.models.architecture import DraftConfig, TargetConfig
    from eagle2.models.loader import resolve_draft, resolve_target

    target, draft = settings.model.target, settings.model.draft
    _say(f"Preparing the target {target!r} " + ("without a draft" if draft is None else f"and the draft {draft!r}"))
    TargetConfig.from_folder(resolve_target(target))
    if draft is not None:
        DraftConfig.from_folder(resolve_draft(draft))


def _unset_environment() -> None:
    """What the environment set is in the config by now; replicas inherit nothing that could set it once more."""
    for variable in [v for v in os.environ if v.startswith(ENV_PREFIX) and "__" in v]:
        del os.environ[variable]


def _say(line: str) -> None:
    print(f"eagle2 serve: {line}", file=sys.stderr, flush=True)


def _take_signals() -> None:
    # SIGINT too: a shell without job control starts background commands with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

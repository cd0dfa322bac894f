"""What is read out of Serve's status: who runs, and the one sentence of a failure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle2.operations.deployment_status import last_error, own_error, read_progress

_TRACEBACK = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:eagle2:DraftProposer.initialize_and_get_metadata() (pid=7, actor_id=a1)
  File "replica.py", line 1, in initialize
eagle2.errors.{kind}: {sentence}

The above exception was the direct cause of the following exception:
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 2, in initialize
eagle2.errors.{kind}: {sentence}"""


def _status(app: str, message: str = "", **deployments: tuple[str, str]) -> SimpleNamespace:
    states = {name: SimpleNamespace(status=status, message=said) for name, (status, said) in deployments.items()}
    return SimpleNamespace(applications={"eagle2": SimpleNamespace(status=app, message=message, deployments=states)})


@pytest.mark.parametrize("kind", ["ModelError", "ConfigError"])
def test_our_own_refusal_ends_the_wait_though_serve_would_try_again(kind: str) -> None:
    message = _TRACEBACK.format(kind=kind, sentence="The head's hidden size is 3, the target's 5.")
    progress = read_progress(_status("DEPLOYING", A=("HEALTHY", ""), B=("UPDATING", message)), "eagle2")
    assert progress.failure == "The head's hidden size is 3, the target's 5."


def test_another_error_ends_the_wait_once_serve_gives_up() -> None:
    message = "Traceback:\n  File\nOSError: [Errno 28] No space left on device"
    starting = _status("DEPLOYING", B=("UPDATING", message))
    assert read_progress(starting, "eagle2").failure is None
    failed = _status("DEPLOY_FAILED", B=("DEPLOY_FAILED", message))
    assert read_progress(failed, "eagle2").failure == "[Errno 28] No space left on device"


def test_an_unhealthy_application_without_an_error_says_what_serve_says() -> None:
    progress = read_progress(
        _status("UNHEALTHY", "The deployments ['B'] are UNHEALTHY.", B=("UNHEALTHY", "")), "eagle2"
    )
    assert progress.failure == "The deployments ['B'] are UNHEALTHY."


def test_progress_names_who_runs_and_who_is_waited_for() -> None:
    progress = read_progress(_status("DEPLOYING", B=("HEALTHY", ""), A=("HEALTHY", ""), C=("UPDATING", "")), "eagle2")
    assert (progress.running, progress.waiting, progress.failure) == (("A", "B"), ("C",), None)


def test_an_application_that_serve_does_not_know_yet_is_waited_for() -> None:
    assert read_progress(SimpleNamespace(applications={}), "eagle2").failure is None


def test_no_sentence_is_found_where_there_is_no_error() -> None:
    assert own_error("Deployment is updating, nothing wrong.") is None
    assert last_error("") is None

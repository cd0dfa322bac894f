"""How far a deployment is, and the one sentence that says why it failed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# The last line of a traceback that ends with one of our own errors names class and sentence.
_OWN_ERROR = re.compile(r"^(?:.*\.)?(?:ModelError|ConfigError)(?:\(\w+\))?: (.+)$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)[\w.()]*: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DeploymentProgress:
    """``running`` of ``total`` deployments serve; ``failure`` is set when waiting longer is of no use."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    failure: str | None


def read_progress(status: Any, application: str) -> DeploymentProgress:
    """The state of one application in what ``ray.serve.status()`` returned."""
    overview = status.applications.get(application)
    if overview is None:
        return DeploymentProgress((), (), None)
    healthy = {name for name, d in overview.deployments.items() if d.status == "HEALTHY"}
    messages = [d.message for d in overview.deployments.values()] + [overview.message]
    failure = next((s for s in map(own_error, messages) if s), None)
    if failure is None and overview.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        failure = next((s for s in map(last_error, messages) if s), overview.message.strip())
    waiting = tuple(name for name in overview.deployments if name not in healthy)
    return DeploymentProgress(tuple(sorted(healthy)), waiting, failure)


def own_error(message: str) -> str | None:
    """The sentence of a ``ModelError`` or ``ConfigError`` in a traceback; trying again will not help there."""
    found = _OWN_ERROR.findall(message)
    return found[-1].strip() if found else None


def last_error(message: str) -> str | None:
    """The sentence of the last error in a traceback, whichever it is."""
    found = _ANY_ERROR.findall(message)
    return found[-1].strip() if found else None

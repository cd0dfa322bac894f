"""On Kubernetes: whether the node of this verifier is about to go, as its Node object says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, V1Node

logger = logging.getLogger(__name__)

NODE_VARIABLE = "NODE_NAME"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "node.kubernetes.io/out-of-service",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
    }
)
_TAINT_PREFIXES = ("aws-node-termination-handler/",)
_CONNECT_S, _WATCH_S = 5, 60


def leaving_reason(node: V1Node) -> str | None:
    """The taint by which its cluster announces the end of a node, ``unschedulable`` for a cordon, None for neither."""
    spec = node.spec
    if spec is None:
        return None
    for taint in spec.taints or ():
        if taint.key in _TAINTS or taint.key.startswith(_TAINT_PREFIXES):
            return str(taint.key)
    return "unschedulable" if spec.unschedulable else None


class NodeWatch:
    """Tells when the node is to go, with a reason, and with None when that is taken back. From a thread of its own.

    It needs the right to list and watch this one Node. An API that fails changes nothing: it is asked again after
    ``first_pause_s``, then after twice as long each time, at most ``longest_pause_s``.
    """

    def __init__(
        self,
        api: CoreV1Api,
        node: str,
        tell: Callable[[str | None], None],
        *,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 60.0,
    ) -> None:
        self._api, self._node, self._tell = api, node, tell
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._reason: str | None = None
        self._stopping = threading.Event()
        # A daemon: a read that waits for the API must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="eagle2-node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tell nothing from now on."""
        self._stopping.set()

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while not self._stopping.is_set():
            try:
                self._look()
                pause_s = self._first_pause_s
            except Exception as error:
                # Whatever it is, the verifier serves on; it only will not know of the end in advance.
                status = getattr(error, "status", None)
                logger.warning("Node %s cannot be watched: %s.", self._node, status or type(error).__name__)
                self._stopping.wait(pause_s)
                pause_s = min(self._longest_pause_s, 2 * pause_s)

    def _look(self) -> None:
        """Read the Node once, then follow its changes until the API ends the watch."""
        from kubernetes.watch import Watch

        selector = f"metadata.name={self._node}"
        nodes = self._api.list_node(field_selector=selector, _request_timeout=(_CONNECT_S, _CONNECT_S))
        for node in nodes.items:
            self._see(leaving_reason(node))
        events = Watch().stream(
            self._api.list_node,
            field_selector=selector,
            resource_version=nodes.metadata.resource_version if nodes.metadata else None,
            timeout_seconds=_WATCH_S,
            # A network that swallows packets gives no error.
            _request_timeout=(_CONNECT_S, _WATCH_S + _CONNECT_S),
        )
        for event in events:
            if self._stopping.is_set():
                return
            self._see("deleted" if event["type"] == "DELETED" else leaving_reason(event["object"]))

    def _see(self, reason: str | None) -> None:
        if reason != self._reason and not self._stopping.is_set():
            self._reason = reason
            logger.warning("Node %s %s.", self._node, f"is to go: {reason}" if reason else "stays after all")
            self._tell(reason)


def watch_own_node(
    tell: Callable[[str | None], None], environ: Mapping[str, str], *, account: Path = _ACCOUNT
) -> NodeWatch | None:
    """A watch that has started; None outside a cluster, without ``NODE_NAME``, or without the ``kubernetes`` extra."""
    node = environ.get(NODE_VARIABLE)
    if not node or not account.exists():
        return None
    try:
        from kubernetes import client, config
    except ImportError:
        logger.info("The end of a node is not seen in advance: the extra 'kubernetes' is not installed.")
        return None
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException as error:
        logger.warning("Node %s cannot be watched: %s", node, error)
        return None
    watch = NodeWatch(client.CoreV1Api(client.ApiClient(settings)), node, tell)
    watch.start()
    return watch

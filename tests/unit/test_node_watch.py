"""A verifier learns from the Kubernetes API that its node is to go; an API that fails changes nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle2.verifier.node_watch import NodeWatch, leaving_reason, watch_own_node
from fakes.node_api import NodeApi

client = pytest.importorskip("kubernetes.client")


@pytest.fixture
def api() -> Iterator[NodeApi]:
    with NodeApi() as api:
        yield api


@pytest.fixture
def told(api: NodeApi) -> Iterator[queue.Queue[str | None]]:
    """What a watch of the Node tells."""
    settings = client.Configuration()
    settings.host = api.url
    told: queue.Queue[str | None] = queue.Queue()
    core = client.CoreV1Api(client.ApiClient(settings))
    watch = NodeWatch(core, "n1", told.put, first_pause_s=0.01, longest_pause_s=0.02)
    watch.start()
    yield told
    watch.stop()


def test_a_taint_is_told_and_taken_back(api: NodeApi, told: queue.Queue[str | None]) -> None:
    api.wait_for("watches", 1)
    api.change("nvidia.com/gpu")
    api.change("nvidia.com/gpu", "karpenter.sh/disrupted")
    assert told.get(timeout=20) == "karpenter.sh/disrupted"
    api.change("nvidia.com/gpu")
    assert told.get(timeout=20) is None
    assert api.selectors == {"metadata.name=n1"}


def test_a_taint_from_before_is_found(api: NodeApi, told: queue.Queue[str | None]) -> None:
    api.change("ToBeDeletedByClusterAutoscaler")
    assert told.get(timeout=20) == "ToBeDeletedByClusterAutoscaler"


def test_a_node_that_is_deleted_is_to_go(api: NodeApi, told: queue.Queue[str | None]) -> None:
    api.wait_for("watches", 1)
    api.change(kind="DELETED")
    assert told.get(timeout=20) == "deleted"


def test_a_watch_that_breaks_is_begun_again(api: NodeApi, told: queue.Queue[str | None]) -> None:
    api.wait_for("watches", 1)
    api.cut()
    api.wait_for("watches", 2)
    api.change(unschedulable=True)
    assert told.get(timeout=20) == "unschedulable"


def test_a_version_that_is_too_old_is_read_again(api: NodeApi, told: queue.Queue[str | None]) -> None:
    api.wait_for("watches", 1)
    api.expire_next = True
    api.cut()
    api.wait_for("watches", 3)
    api.change("aws-node-termination-handler/spot-itn")
    assert told.get(timeout=20) == "aws-node-termination-handler/spot-itn"


@pytest.mark.parametrize("status", [401, 403, 500])
def test_an_api_that_refuses_is_asked_again(status: int, api: NodeApi, told: queue.Queue[str | None]) -> None:
    api.refuse = status
    api.cut()
    api.wait_for("lists", api.lists + 3)
    assert told.empty()
    api.refuse = None
    api.change("node.kubernetes.io/out-of-service")
    assert told.get(timeout=20) == "node.kubernetes.io/out-of-service"


def test_a_node_without_a_spec_stays() -> None:
    assert leaving_reason(client.V1Node()) is None
    taint = client.V1Taint(key="node.kubernetes.io/unreachable", effect="NoExecute")
    assert leaving_reason(client.V1Node(spec=client.V1NodeSpec(taints=[taint]))) is None


def test_it_is_off_outside_a_cluster(tmp_path: Path) -> None:
    account = tmp_path / "token"
    assert watch_own_node(print, {"NODE_NAME": "n1"}, account=account) is None
    account.write_text("secret")
    assert watch_own_node(print, {}, account=account) is None
    # An account without a cluster around it is told in the log, and nothing more.
    assert watch_own_node(print, {"NODE_NAME": "n1"}, account=account) is None

"""Which verifiers there are, as Serve tells it, for all who ask in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from eagle2.protocol import Replica


class Directory:
    """The replicas of one deployment that take requests. Written from Serve's thread, read from any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: dict[str, Replica] = {}
        self._dead: set[str] = set()

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._listed.values())

    def lists(self, replica: Replica) -> bool:
        return self._listed.get(replica.uid) == replica

    def publish(self, replicas: Iterable[Replica]) -> None:
        """Replace what was there. Those that were lost stay away: Serve notices a death a little later than callers."""
        with self._lock:
            told = {replica.uid: replica for replica in replicas}
            self._dead &= told.keys()
            self._listed = {uid: replica for uid, replica in told.items() if uid not in self._dead}

    def lost(self, uid: str) -> None:
        """The process of this replica has died. Serve never gives its uid to another one."""
        with self._lock:
            self._dead.add(uid)
            self._listed = {other: replica for other, replica in self._listed.items() if other != uid}


# Serve makes the routers of handles itself and gives no access to them: they and the fleets of a process meet here.
_directories: dict[tuple[str, str], Directory] = {}
_directories_lock = threading.Lock()


def directory_of(application: str, deployment: str) -> Directory:
    """The directory of a deployment in this process. It fills once a handle of the deployment is in use."""
    with _directories_lock:
        return _directories.setdefault((application, deployment), Directory())

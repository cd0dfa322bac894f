"""What a bench has measured so far: in memory, and in a folder that a later run goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle2.errors import ConfigError
from eagle2.evaluation.acceptance import Acceptance, Cell
from eagle2.speculative.static import Rates
from eagle2.training.checkpoint import write_atomically

_PARTS = "parts"


class Results:
    """Measurements by cell. With a folder, each is written there as it comes, and those of earlier runs are read.

    ``identity`` says what was measured, and how: models, sizes, settings. Results of another identity do not mix.
    Raises ``ConfigError`` where the folder's differs, or a file in it cannot be read.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        self.identity = dict(identity)
        self.acceptance: dict[Cell, Acceptance] = {}
        self.speed: dict[tuple[float, str], dict[str, Any]] = {}
        self.calibration: dict[str, Any] = {}
        self.rates: Rates | None = None
        self.rate_visits: list[int] = []
        self._folder = None if folder is None else folder / _PARTS
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._check_identity()
            for path in sorted(self._folder.glob("*.json")):
                self._read(path)

    def add_acceptance(self, measured: Acceptance) -> None:
        self.acceptance[measured.cell] = measured
        self._write(f"tau_{measured.cell.name}", measured.as_json())

    def add_speed(self, temperature: float, task: str, values: dict[str, Any]) -> None:
        """``values`` of ``speed_rows``, for all systems that were measured in turns on one task."""
        self.speed[temperature, task] = values
        self._write(f"speed_t{temperature:g}_{task}", {"temperature": temperature, "task": task, **values})

    def add_rates(self, rates: Rates, visits: list[int]) -> None:
        self.rates, self.rate_visits = rates, visits
        self._write("rates", {"rates": rates, "visits": visits})

    def add_calibration(self, temperature: float, report: dict[str, Any]) -> None:
        self.calibration[f"{temperature:g}"] = report
        self._write(f"calibration_t{temperature:g}", {"temperature": temperature, "report": report})

    def _check_identity(self) -> None:
        assert self._folder is not None
        path = self._folder / "identity.json"
        if path.is_file():
            found = _load(path)
            for key, value in self.identity.items():
                if found.get(key) != value:
                    raise ConfigError(
                        f"{self._folder.parent} holds results with {key} = {found.get(key)!r}, and this run has "
                        f"{value!r}: name another folder, or remove that one."
                    )
        else:
            self._write("identity", self.identity)

    def _read(self, path: Path) -> None:
        values = _load(path)
        try:
            if path.name.startswith("tau_"):
                measured = Acceptance.from_json(values)
                self.acceptance[measured.cell] = measured
            elif path.name.startswith("speed_"):
                self.speed[values["temperature"], values["task"]] = values
            elif path.name.startswith("calibration_"):
                self.calibration[f"{values['temperature']:g}"] = values["report"]
            elif path.name == "rates.json":
                self.rates = tuple(tuple(row) for row in values["rates"])
                self.rate_visits = values["visits"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no result of a bench ({error!r}); remove it to measure it again.") from None

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        write_atomically(self._folder / f"{name}.json", (json.dumps(values) + "\n").encode())


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it to measure it again.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no result of a bench; remove it to measure it again.")
    return values

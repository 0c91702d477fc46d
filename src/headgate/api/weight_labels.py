"""Labels of weight versions: the trainer's own names for them.

A label is any text and may repeat, for example after a restart of the trainer. Cache keys, the order of updates and the
spans of an answer use the number of the version, which only rises. A version without a label is named by its number.
"""

from __future__ import annotations

MOST_LABELS = 4096  # an answer that spans older versions names those by number


class WeightLabels:
    def __init__(self) -> None:
        self._by_version: dict[int, str] = {}  # in the order in which they were set

    def __getitem__(self, version: int) -> str:
        return self._by_version.get(version) or str(version)

    def given(self, version: int) -> str | None:
        """The label, if the version has one."""
        return self._by_version.get(version)

    def set(self, version: int, label: str | None) -> None:
        """Name a version; None or an empty text removes its label."""
        self._by_version.pop(version, None)
        if label:
            self._by_version[version] = label
            if len(self._by_version) > MOST_LABELS:
                del self._by_version[next(iter(self._by_version))]

"""Stand-in for tqdm: a progress bar that shows nothing."""

from __future__ import annotations


class tqdm:
    def __init__(self, total: int = 0, desc: str = "", disable: bool = False) -> None:
        pass

    def __enter__(self) -> tqdm:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_postfix(self, values: dict[str, object]) -> None:
        pass

    def update(self, count: int) -> None:
        pass

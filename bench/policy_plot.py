"""PNG plots of policy.py's tables, one for each table with figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "spotfleet"
ACROSS = 4  # panels of a row
TALLEST = 100  # rows of a picture; its title states how many panels are left out


def draw(folder: Path, tables: Sequence[Any]) -> list[Path]:
    """Draw `tables`, which are `policy.Table`s. Returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for table in tables:
        groups = _groups(table)
        if not groups:
            continue
        across, down, shown = laid_out(len(groups))
        figure, axes = pyplot.subplots(down, across, figsize=(5.2 * across, 4.2 * down), layout="constrained",
                                       squeeze=False)
        for axis in axes.flat[shown:]:
            axis.axis("off")
        if shown < len(groups):
            figure.suptitle(f"the first {shown} of {len(groups)} records")
        for (title, labels, series), axis in zip(groups[:shown], axes.flat, strict=False):
            for k, (name, values) in enumerate(series.items()):
                ours = name.startswith(OURS)
                axis.plot(labels, values, "o-" if ours else ".--", color="black" if ours else f"C{k}", label=name)
            axis.set_title(title, fontsize=9)
            axis.tick_params(axis="x", rotation=20, labelsize=8)
            axis.grid(axis="y", alpha=0.4)
        axes[0][0].legend(fontsize=7)
        axes[0][0].set_ylabel("useful of what was offered" if table.name == "B2" else "cost, % of on demand")
        path = folder / f"policy-{table.name.lower()}.png"
        figure.savefig(path, dpi=60)
        pyplot.close(figure)
        written.append(path)
    return written


def laid_out(panels: int) -> tuple[int, int, int]:
    """Return columns, rows, and how many of `panels` they hold: a picture has at most 65536 pixels either way."""
    across = min(panels, ACROSS)
    down = min(-(-panels // across), TALLEST)
    return across, down, min(panels, across * down)


def _groups(table: Any) -> list[tuple[str, list[str], Mapping[str, Sequence[float]]]]:
    """Return (title, labels of the x axis, values of each system) of each panel."""
    figures = table.figures
    if not table.used or not figures:
        return []
    if table.name == "B1":
        return [(table.title, figures["cells"], figures["cost"])]
    if table.name == "B3":
        labels = [f"R={r}" for r in figures["deadlines_h"]]
        return [(name.rsplit("/", 1)[-1], labels, series) for name, series in figures["cost"].items()]
    return [(table.title, [name[:22] for name in figures], {"useful of what was offered": list(figures.values())})]

"""The plot of a training run."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot_metrics(metrics: dict[str, Any], path: Path) -> None:
    """Draws losses, accuracy, and the verdicts' balanced accuracy over the steps.

    Args:
        metrics: As in `metrics.json`.
        path: The picture's file.
    """
    history = metrics["history"]
    if not history:
        return
    steps = [entry["step"] for entry in history]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    left.semilogy(steps, [entry["writing_loss"] for entry in history], label="characters")
    if any(entry["judging_loss"] for entry in history):
        left.semilogy(steps, [entry["judging_loss"] for entry in history], label="verdicts")
    left.set(xlabel="step", ylabel="training loss (nats)", title=f"{metrics['settings']['role']}: losses")
    right.plot(steps, [entry["accuracy"] for entry in history], label="final answers", color="black")
    right.plot(
        steps, [entry["step_accuracy"] for entry in history], label="written steps", color="black", linestyle=":"
    )
    for source, style in (("synthetic", "--"), ("draft", "-")):
        for kind, color in (("whole", "tab:blue"), ("unfinished", "tab:orange")):
            points = [
                (entry["step"], entry["judge"][source][kind]["balanced"])
                for entry in history
                if source in entry.get("judge", {})
            ]
            if points:
                label = f"verdicts: {kind}, {'the draft’s' if source == 'draft' else 'corrupted'}"
                right.plot(*zip(*points, strict=True), style, color=color, label=label)
    right.set(xlabel="step", ylabel="share right, validation", ylim=(0, 1.02), title="accuracy (verdicts: balanced)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

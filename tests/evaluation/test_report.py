"""The numbers: intervals and tests against values worked out by hand, rows from records, tables and pictures."""

import json
import math

import numpy
import pytest

from hf_semspec.evaluation import plots
from hf_semspec.evaluation.contenders import parse_contenders
from hf_semspec.evaluation.grids import parse_grid
from hf_semspec.evaluation.report import Report
from hf_semspec.evaluation.statistics import bootstrap, mcnemar, share_interval, wilson
from hf_semspec.evaluation.summary import difference, summarize

scipy_stats = pytest.importorskip("scipy.stats")


class TestStatistics:
    def test_wilson_by_hand(self):
        # n = 10, k = 8, z = 1.96: centre (0.8 + z²/20) / (1 + z²/10), half-width z √(0.016 + z²/400) / (1 + z²/10).
        z2 = 1.959963984540054**2
        centre, half = (0.8 + z2 / 20) / (1 + z2 / 10), math.sqrt(z2 * (0.016 + z2 / 400)) / (1 + z2 / 10)
        assert wilson(8, 10) == pytest.approx((centre - half, centre + half))
        assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)

    @pytest.mark.parametrize(("k", "n"), [(0, 5), (5, 5), (1, 3), (911, 1000)])
    def test_wilson_agrees_with_scipys(self, k, n):
        theirs = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
        assert wilson(k, n) == pytest.approx((theirs.low, theirs.high))

    def test_wilson_stays_inside(self):
        assert wilson(0, 3)[0] == 0.0
        assert wilson(3, 3)[1] == 1.0

    @pytest.mark.parametrize(
        ("better", "worse", "p"),
        [
            (0, 0, 1.0),
            (1, 0, 1.0),
            (5, 0, 2 / 2**5),
            (0, 5, 2 / 2**5),
            (8, 2, 2 * (1 + 10 + 45) / 2**10),
            (6, 4, 2 * (1 + 10 + 45 + 120 + 210) / 2**10),
            (4, 4, 1.0),
        ],
    )
    def test_mcnemar_by_hand(self, better, worse, p):
        assert mcnemar(better, worse) == pytest.approx(p)

    def test_the_bootstrap_covers_and_is_the_same_every_time(self):
        values = [0.0] * 30 + [1.0] * 70
        low, high = bootstrap(values)
        assert (low, high) == bootstrap(values)
        # The normal approximation: 0.7 ± 1.96 √(0.7 · 0.3 / 100).
        assert low == pytest.approx(0.61, abs=0.025)
        assert high == pytest.approx(0.79, abs=0.025)

    def test_no_rounding_puts_the_bootstrap_of_a_median_outside_of_its_values(self):
        # Resampled medians of two values are mostly one of the two; scipy's interpolation between equals leaves them.
        for values in numpy.random.default_rng(0).random((300, 2)):
            low, high = bootstrap(list(values), numpy.median)
            assert (low, high) == (min(values), max(values))

    def test_the_bootstrap_of_what_never_varies_says_nothing(self):
        assert bootstrap([1.0]) is None
        assert bootstrap([0.5] * 9) is None

    def test_prompts_are_what_is_independent(self):
        """Ten prompts, always or never right: thirty samples each tell no more than one."""
        means = [0.0] * 4 + [1.0] * 6
        (low, high), method = share_interval(means, 30)
        assert method == "bootstrap over prompts"
        naive = wilson(180, 300)
        assert high - low > 3 * (naive[1] - naive[0])
        assert share_interval(means, 1) == (wilson(6, 10), "Wilson")
        assert share_interval([1.0] * 10, 30) == (wilson(10, 10), "Wilson")


class TestDifference:
    def test_pairs_of_one_seed(self):
        ours = {0: {0: True, 1: False}, 1: {0: True, 1: True}, 2: {0: False, 1: False}}
        target = {0: {0: False, 1: False}, 1: {0: True, 1: False}, 2: {0: True, 1: False}}
        found = difference(ours, target, [0, 1])
        assert (found["better"], found["worse"], found["pairs"], found["prompts"]) == (2, 1, 6, 3)
        assert found["value"] == pytest.approx((0.5 + 0.5 - 0.5) / 3)
        assert found["p_value"] == mcnemar(2, 1)

    def test_what_does_not_draw_is_paired_with_every_seed(self):
        ours, target = {0: {0: True, 1: False, 2: False}}, {0: {0: True}}
        found = difference(ours, target, [0, 1, 2])
        assert (found["better"], found["worse"], found["pairs"]) == (0, 2, 3)
        swapped = difference(target, ours, [0, 1, 2])
        assert (swapped["better"], swapped["worse"], swapped["pairs"]) == (2, 0, 3)

    def test_two_that_do_not_draw_are_one_pair_a_prompt(self):
        found = difference({0: {0: True}, 1: {0: True}}, {0: {0: False}, 1: {0: True}}, [0, 1, 2])
        assert (found["better"], found["worse"], found["pairs"]) == (1, 0, 2)

    def test_without_a_common_prompt(self):
        assert difference({0: {0: True}}, {1: {0: True}}, [0]) is None


def record(contender, batch, correct, tokens, seconds, *, seed=0, session="a", **figures):
    return {
        "seed": seed,
        "batch": batch,
        "contender": contender,
        "prompts": [2 * batch + i for i in range(len(correct))],
        "texts": ["x"] * len(correct),
        "correct": correct,
        "new_tokens": tokens,
        "seconds": seconds,
        "session": session,
        "figures": figures,
    }


def some_rows():
    records = [
        record("target", 0, [True, True], [10, 20], 3.0, target_forwards=20),
        record("lossless", 0, [True, False], [10, 20], 1.0, target_forwards=6, accepted=20, tested=25),
        record("target", 1, [False, True], [10, 10], 4.0, target_forwards=10),
        record("lossless", 1, [True, True], [10, 30], 2.0, target_forwards=8, accepted=10, tested=15),
        record("target", 2, [True], [10], 1.0, target_forwards=10),
        record("lossless", 2, [True], [10], 0.1, session="b", target_forwards=4, accepted=5, tested=10),
    ]
    return summarize(records, parse_contenders("target,lossless"), None, [0])


class TestSummary:
    def test_by_hand(self):
        target, lossless = some_rows()
        assert (target["accuracy"], lossless["accuracy"]) == (0.8, 0.8)
        assert lossless["interval"] == list(wilson(4, 5))
        assert "difference" not in target
        assert (lossless["difference"]["better"], lossless["difference"]["worse"]) == (1, 1)
        assert lossless["tokens_per_second"] == pytest.approx(80 / 3.1)
        # Batches 0 and 1 were decoded in one session with the target's: (30/1)/(30/3) = 3, (40/2)/(20/4) = 4.
        assert (lossless["speed_ratio"], lossless["turns"]) == (3.5, 2)
        assert lossless["answer_ratio"] == pytest.approx((3 + 2) / 2)
        assert target["speed_ratio"] == 1.0
        assert lossless["acceptance_rate"] == pytest.approx(35 / 50)
        # Calls times rows: (6·2 + 8·2 + 4·1) / 80.
        assert lossless["target_forwards_per_token"] == pytest.approx(32 / 80)
        assert json.loads(json.dumps(lossless)) == lossless

    def test_only_figures_that_apply(self):
        kinds = "easd,smc,parse=lossless,best_of,assisted"
        figures = {"accepted": 6, "tested": 10, "triggered": 2, "target_forwards": 4, "ess": 6.0, "ess_count": 3}
        plain = ("easd", "smc", "best_of", "assisted")
        records = [record("target", 0, [True, True], [5, 5], 1.0, target_forwards=5)]
        for name in plain:
            own = figures if name == "smc" else {k: v for k, v in figures.items() if "ess" not in k}
            records.append(record(name, 0, [True, True], [5, 5], 1.0, **own))
        records.append(record("parse", 0, [True, True], [5, 5], 1.0, answers=2, full_accepts=1, kept=7, written=10))
        rows = {row["name"]: row for row in summarize(records, parse_contenders(kinds), None, [0])}
        assert rows["easd"]["trigger_rate"] == pytest.approx(2 / 8)
        assert rows["easd"]["acceptance_rate"] == pytest.approx(0.6)
        assert rows["smc"]["ess"] == 2.0
        assert rows["parse"]["full_accept_rate"] == 0.5
        assert rows["parse"]["kept_fraction"] == 0.7
        assert not {"acceptance_rate", "trigger_rate"} & rows["smc"].keys()
        assert not {"ess", "full_accept_rate", "kept_fraction"} & rows["easd"].keys()
        assert not {"acceptance_rate", "ess"} & rows["best_of"].keys()
        # Rows of a batch are decoded one after the other: four calls are four calls.
        assert rows["assisted"]["target_forwards_per_token"] == pytest.approx(0.4)
        assert rows["easd"]["target_forwards_per_token"] == pytest.approx(0.8)

    def test_several_seeds(self):
        records = [record("target", 0, [True, False], [5, 5], 1.0)]
        records += [record("smc", 0, [True, seed > 0], [5, 5], 1.0, seed=seed) for seed in range(3)]
        _, smc = summarize(records, parse_contenders("smc"), None, [0, 1, 2])
        assert smc["samples"] == 6
        assert smc["accuracy"] == pytest.approx(5 / 6)
        assert smc["interval_method"] == "bootstrap over prompts"
        assert (smc["difference"]["better"], smc["difference"]["pairs"]) == (2, 6)
        assert smc["turns"] == 1


def report(rows, grids=()):
    machine = {"processor": "cpu", "cores": 2, "torch_threads": 1, "accelerator": None}
    run = {"model": "a/target", "draft": "a/draft", "task": {"name": "jsonl", "examples": 5}, "temperature": None}
    meta = {
        "command": "hf-semspec eval",
        "commit": "abc",
        "date": "2026-01-01",
        "python": "3",
        "versions": {"torch": "2"},
        "machine": machine,
        "processes": 1,
        "sessions": [{"commit": "abc"}],
        "run": {**run, "batch_size": 2, "seeds": [0]},
    }
    return Report(meta, rows, [], list(grids))


class TestReport:
    def test_empty_columns_are_left_out(self):
        page = report(some_rows()).markdown()
        assert "| `lossless` | 80.0% | 37.6 to 96.4 | +0.0" in page
        assert "acceptance" in page and "ESS" not in page and "kept" not in page
        assert "`hf-semspec eval` at commit abc" in page

    def test_repeated_prompts_are_said_to_be(self):
        assert "not independent" not in report(some_rows()).note()
        records = [record("target", 0, [True], [5], 1.0)] + [
            record("smc", 0, [True], [5], 1.0, seed=i) for i in (0, 1)
        ]
        rows = summarize(records, parse_contenders("smc"), None, [0, 1])
        assert "not independent" in report(rows).note()

    def test_row(self):
        assert report(some_rows()).row("lossless")["kind"] == "lossless"
        with pytest.raises(KeyError):
            report(some_rows()).row("nobody")

    def test_writes_all_files(self, tmp_path):
        grid = parse_grid("lossless:num_draft_tokens=1|2")
        files = report(some_rows(), [grid]).write(tmp_path)
        assert {path.name for path in files} == {
            "results.json",
            "results.md",
            "quality_speed.png",
            "quality_speed.pdf",
            "grid_lossless.png",
            "grid_lossless.pdf",
        }
        assert all(path.stat().st_size > 0 for path in files)


class TestPictures:
    @pytest.fixture
    def drawn(self, monkeypatch):
        """The figures, as they are saved."""
        figure = pytest.importorskip("matplotlib.figure").Figure
        saved = []
        original = figure.savefig

        def savefig(self, path, **kwargs):
            saved.append(self)
            return original(self, path, **kwargs)

        monkeypatch.setattr(figure, "savefig", savefig)
        return saved

    def crowded(self):
        rows = some_rows()
        return rows + [
            {**rows[1], "name": f"other {i}", "accuracy": 0.8 + i / 200, "speed_ratio": 3.5 + i / 50} for i in range(6)
        ]

    def test_every_point_is_labelled_and_no_label_covers_another(self, drawn, tmp_path):
        rows = self.crowded()
        plots.plot_quality(rows, tmp_path / "q.png", "title")
        axes = drawn[0].axes[0]
        assert [note.get_text() for note in axes.texts] and {n.get_text() for n in axes.texts} == {
            r["name"] for r in rows
        }
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        renderer = FigureCanvasAgg(drawn[0]).get_renderer()
        boxes = [plots._text_box(note, renderer) for note in axes.texts]
        frame = drawn[0].bbox
        for i, box in enumerate(boxes):
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            assert all(plots._overlap(box, other) == 0 for other in boxes[:i])
        assert (tmp_path / "q.png").stat().st_size > 10_000

    def test_points_stand_where_the_rows_say(self, drawn, tmp_path):
        plots.plot_quality(some_rows(), tmp_path / "q.png")
        points = {
            tuple(p)
            for line in drawn[0].axes[0].lines
            for p in line.get_xydata().tolist()
            if line.get_marker() in "so"
        }
        assert points == {(1.0, 80.0), (3.5, 80.0)}

    @pytest.mark.parametrize(
        ("text", "shape"),
        [
            ("easd:penalty=0|0.5|1", (1, (1, 3))),
            ("easd:penalty=0|1,top_n=5|10|20", (1, (2, 3))),
            ("easd:overlap_threshold=0.5|0.9,penalty=0|1,top_n=5|10|20", (2, (2, 3))),
        ],
    )
    def test_heat_maps_hold_the_cells_in_order(self, drawn, tmp_path, text, shape):
        grid = parse_grid(text)
        cells = [
            {"name": one.name, "accuracy": i / 100, "speed_ratio": 10.0 + i} for i, one in enumerate(grid.contenders())
        ]
        plots.plot_heat_maps(grid.table(cells), tmp_path / "h.png", "title")
        axes = drawn[0].axes
        facets, size = shape
        assert len(axes) == 2 * facets
        assert axes[0].images[0].get_array().shape == size
        quality = [v for panel in axes[0::2] for v in panel.images[0].get_array().ravel().tolist()]
        speed = [v for panel in axes[1::2] for v in panel.images[0].get_array().ravel().tolist()]
        assert quality == pytest.approx([float(i) for i in range(len(cells))])
        assert speed == [10.0 + i for i in range(len(cells))]
        written = [note.get_text() for note in axes[-1].texts]
        assert written == [f"{value:.2f}" for value in speed[-math.prod(size) :]]

    def test_a_cell_without_a_value_is_shown_as_missing(self, drawn, tmp_path):
        grid = parse_grid("easd:penalty=0|1")
        plots.plot_heat_maps(grid.table([{"name": "easd:penalty=0", "accuracy": 0.5}]), tmp_path / "h.png")
        assert [note.get_text() for note in drawn[0].axes[0].texts] == ["50.0", "–"]

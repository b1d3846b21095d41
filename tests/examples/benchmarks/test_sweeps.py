"""Sweeps go on after an interruption and make the page; a round's time is split into its parts."""

import json

import pytest

from examples.benchmarks import __main__ as command
from examples.benchmarks import page, profiling, sweeps
from examples.benchmarks.marks import marks
from hf_semspec.bench import bench
from hf_semspec.bench.rivals import check_schemes
from hf_semspec.bench.subject import controlled_subject
from tests.bench.shared import PAIR, SMALLEST

# Stock's assisted generation makes calls that transformers itself reports as deprecated.
pytestmark = [pytest.mark.deprecated, pytest.mark.filterwarnings("ignore")]


class TestProfile:
    def test_a_parts_time_is_its_own(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
        clock = profiling.Clock()

        def spend(seconds):
            now[0] += seconds

        inner = clock.timed(spend, "inner")

        def outer():
            spend(1)
            inner(10)
            spend(2)

        clock.enter("rest")
        spend(100)
        clock.timed(outer, "outer")()
        clock.leave()
        assert clock.seconds == {"rest": 100, "outer": 3, "inner": 10}

    def test_all_that_is_timed_exists(self):
        gone = [name for names in profiling.PARTS.values() for name in names if profiling.resolve(name) is None]
        assert not gone, "profiling.PARTS is out of date"

    def test_rounds_of_every_scheme(self):
        subject = controlled_subject(0.7, target_size=SMALLEST, draft_size=SMALLEST, vocab=200)
        before = {name: profiling.resolve(name) for names in profiling.PARTS.values() for name in names}
        functions = {name: vars(owner)[attribute] for name, (owner, attribute) in before.items()}
        schemes = ("lossless:num_draft_tokens=3", "easd", "smc:num_particles=2,num_draft_tokens=3")
        rows = profiling.profile(subject, check_schemes(schemes), new_tokens=10, repeats=1)
        assert [row["name"] for row in rows] == list(schemes)
        for row in rows:
            parts = row["milliseconds"]
            assert {
                profiling.DRAFT,
                profiling.TARGET,
                profiling.LOOP,
                profiling.PREPARES,
                "host read",
                "laws",
            } <= parts.keys()
            inside = (profiling.DRAFT, profiling.TARGET, profiling.WRITES)
            outside = sum(value for part, value in parts.items() if part not in inside)
            assert row["outside"] == pytest.approx(outside / sum(parts.values()))
        assert "entropies" in rows[1]["milliseconds"]
        assert "weights and resampling" in rows[2]["milliseconds"]
        for name, (owner, attribute) in before.items():
            assert vars(owner)[attribute] is functions[name]
        assert "forward" not in vars(subject.model)


class TestSweeps:
    def test_an_interrupted_sweep_goes_on_and_makes_the_page(self, tmp_path, monkeypatch):
        measured = bench(**PAIR, schemes=("lossless:num_draft_tokens=3",), batches=(1,), new_tokens=8, repeats=2)
        asked = []

        def point(subject, wanted, *, batch, tuned=None, **kwargs):
            asked.append((subject.about["controlled"], batch, tuned))
            return measured.points[0] | {"batch": batch}

        monkeypatch.setattr(sweeps, "measure_point", point)
        small = sweeps.replace(
            sweeps.quick("pairs"), target=SMALLEST, draft=SMALLEST, vocab=200, agreements=(0.5, 0.65), batches=(1, 2)
        )
        told = []
        where = {"out": tmp_path, "work": tmp_path / "work"}
        sweeps.run_sweep("pairs", small, **where, minutes=1e-9, report=told.append)
        assert len(asked) <= 1
        assert "points left" in told[-1]
        result = sweeps.run_sweep("pairs", small, **where, command="the command")
        tuned = measured.points[0]["tuned"]
        assert asked == [(0.5, 1, None), (0.65, 1, None), (0.5, 2, tuned), (0.65, 2, tuned)]
        assert sweeps.run_sweep("pairs", small, **where)["points"] == result["points"]
        assert len(asked) == 4
        with pytest.raises(ValueError, match="seed"):
            sweeps.run_sweep("pairs", sweeps.replace(small, seed=1), **where)

        (tmp_path / "page.md").write_text(f"{marks()[0]}\n{marks()[1]}")
        page.write_page(tmp_path, tmp_path / "page.md")
        text = (tmp_path / "page.md").read_text()
        assert "| plain, tokens/s |" in text
        assert "### Batch 2 at agreement 0.65" in text
        assert "HF assisted, tuned" in text
        assert "all with plain decoding's tokens" in text
        assert text.count("Not yet measured") == 3
        assert (tmp_path / "pairs.png").exists()
        assert text == f"{marks()[0]}\n{page.markdown(tmp_path)}\n{marks()[1]}"

    def test_scaling_and_profile(self, tmp_path):
        for kind in ("scaling", "profile"):
            small = sweeps.replace(
                sweeps.quick(kind),
                target=SMALLEST,
                draft=SMALLEST,
                vocab=64,
                repeats=1,
                scaled_tokens=(4, 8),
                scaled_batches=(1,),
                scaled_numbers=(2,),
            )
            sweeps.run_sweep(kind, small, out=tmp_path, work=tmp_path / kind)
        text = page.markdown(tmp_path)
        assert "### New tokens: seconds, peak MB" in text
        assert "| 8 | " in text
        assert "| draft forwards | " in text
        page.draw_scaling(json.loads((tmp_path / "scaling.json").read_text()), tmp_path / "scaling.png")
        assert (tmp_path / "scaling.png").stat().st_size > 5000

    def test_a_mistake_is_one_line(self, tmp_path, capsys):
        assert command.main(["sweep", "pairs", "--out", str(tmp_path), "--minutes", "0"]) == 2
        assert capsys.readouterr().err == "examples.benchmarks: --minutes 0.0: must be > 0\n"

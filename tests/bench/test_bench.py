"""What `bench` measures adds up, and goes on after an interruption."""

import json
import statistics

import numpy
import pytest
import torch

from hf_semspec import cli
from hf_semspec.bench import bench, function, measure, request
from hf_semspec.bench.measure import Entry, Sample, describe_entry
from hf_semspec.bench.rivals import PLAIN, Way, check_schemes, has_ensembles
from hf_semspec.bench.subject import load_subject
from hf_semspec.evaluation.statistics import bootstrap
from tests.bench.shared import PAIR
from tests.models import draft_of, tiny, tokenizer

SCHEMES = ("own=lossless:num_draft_tokens=3", "smc:num_particles=2,num_draft_tokens=3")
RUN = {"schemes": SCHEMES, "batches": (2, 1), "new_tokens": 8, "repeats": 2, "alone": 1}
# Stock's assisted generation makes calls that transformers itself reports as deprecated.
pytestmark = [pytest.mark.deprecated, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return bench(**PAIR, **RUN, out=tmp_path_factory.mktemp("bench"), command="the command")


class TestBench:
    def test_a_result_is_json_and_names_its_origin(self, measured):
        assert json.loads(json.dumps(measured.to_dict(), allow_nan=False)) == measured.to_dict()
        assert measured.meta["command"] == "the command"
        assert {"commit", "date", "python", "versions", "machine"} <= measured.meta.keys()
        assert measured.meta["run"]["pair"]["seed"] == 0
        assert measured.meta["run"]["pair"]["controlled"] == 0.7
        assert measured.meta["about"]["parameters"] == [measured.meta["about"]["parameters"][0]] * 2

    def test_every_rival_is_there_and_exact_ways_give_plain_decodings_tokens(self, measured):
        assert [point["batch"] for point in measured.points] == [1, 2]
        names = [{row["name"] for row in point["rows"]} for point in measured.points]
        rivals = {PLAIN, "plain, sampling", "HF assisted, defaults", "HF prompt lookup", "own", SCHEMES[1]}
        rivals |= {"HF ensemble"} if has_ensembles() else set()
        tuned = {f"HF assisted γ={n}{tail}" for n in (2, 3, 4, 5, 8) for tail in ("", ", sampling")}
        assert names[0] == rivals | tuned
        best = measured.points[0]["tuned"]
        assert names[1] == rivals | {f"HF assisted γ={best['greedy']}", f"HF assisted γ={best['sampling']}, sampling"}
        for point in measured.points:
            exact = [row for row in point["rows"] if row.get("exact")]
            assert len(exact) >= 5
            # One prompt at a time: of a batch of two the first alone is decoded.
            counts = [2 * (1 if row["alone"] else point["batch"]) for row in exact]
            assert [row["matched"] for row in exact] == [[count, count] for count in counts]
            assert not any("matched" in row for row in point["rows"] if row["mode"] == "sampling")

    def test_figures_follow_from_the_samples(self, measured):
        plain, own = measured.row(PLAIN, 2), measured.row("own", 2)
        assert [sample[:2] for sample in own["samples"]] == [[0, 16], [1, 16]]
        speeds = [tokens / seconds for _, tokens, seconds in own["samples"]]
        assert own["tokens_per_second"] == statistics.median(speeds)
        assert own["spread"] == [min(speeds), max(speeds)]
        theirs = [tokens / seconds for _, tokens, seconds in plain["samples"]]
        ratios = [a / b for a, b in zip(speeds, theirs, strict=True)]
        assert own["over_plain"]["value"] == pytest.approx(statistics.median(ratios))
        low, high = own["over_plain"]["interval"]
        assert min(ratios) <= low <= own["over_plain"]["value"] <= high <= max(ratios)
        tuned = next(row for row in measured.points[0]["rows"] if row["tuned"] and row["mode"] == "greedy")
        assert tuned["over_assisted"]["value"] == 1.0

    def test_forwards_and_shares_of_the_time(self, measured):
        assert measured.row(PLAIN)["target_forwards"] == 8
        assert measured.row(PLAIN)["draft_forwards"] == 0
        own = measured.row("own")
        assert own["target_forwards"] < 8
        assert own["draft_forwards"] > 0
        for point in measured.points:
            for row in point["rows"]:
                assert sum(row["shares"].values()) == pytest.approx(1)
                assert all(0 <= share <= 1 for share in row["shares"].values())
        assert measured.row(SCHEMES[1])["ess"] >= 1

    def test_forecasts_stand_beside_what_was_measured(self, measured):
        known = {row["name"] for row in measured.points[1]["rows"] if row["predicted"] is not None}
        assert {"own", SCHEMES[1]} <= known
        assert not {PLAIN, "HF prompt lookup", "HF assisted, defaults"} & known
        assert len(measured.points[0]["costs"]) > 4

    def test_agreement_is_measured_on_the_text_of_each_mode(self, measured):
        for point in measured.points:
            for mode in ("greedy", "sampling"):
                assert point["agreement"][mode]["greedy"] == pytest.approx(0.7, abs=0.15)
                assert point["agreement"][mode]["positions"] == point["batch"] * (16 + 8)

    def test_tables_and_picture(self, measured, tmp_path):
        assert len(measured.tables()) == 2
        assert measured.tables()[0].row_count == len([*{row["name"] for row in measured.points[0]["rows"]}]) - 8
        measured.plot(tmp_path / "x.png")
        assert (tmp_path / "x.png").stat().st_size > 5000
        with pytest.raises(KeyError, match="nobody"):
            measured.row("nobody")

    def test_an_interrupted_run_goes_on_where_it_was(self, measured, tmp_path, monkeypatch):
        stored = measured.points[0]

        def point(subject, wanted, *, batch, tuned, **kwargs):
            if batch == 2 and tuned is None:
                raise AssertionError("the tuned γ of the first point is lost")
            if batch == 2 and not resumed:
                raise KeyboardInterrupt
            return {**stored, "batch": batch}

        resumed = False
        monkeypatch.setattr(function, "measure_point", point)
        with pytest.raises(KeyboardInterrupt):
            bench(**PAIR, **RUN, out=tmp_path)
        resumed = True
        again = bench(**PAIR, **RUN, out=tmp_path)
        assert [each["batch"] for each in again.points] == [1, 2]
        assert again.meta["sessions"] == 2
        # All is there: nothing is loaded, and the files are written anew.
        monkeypatch.setattr(request.PairRequest, "load", lambda self, prompts: pytest.fail("loaded"))
        assert bench(**PAIR, **RUN, out=tmp_path).points == again.points
        assert json.loads((tmp_path / "bench.json").read_text()) == again.to_dict()
        with pytest.raises(ValueError, match="new_tokens was 8, is 9"):
            bench(**PAIR, **{**RUN, "new_tokens": 9}, out=tmp_path)

    def test_loaded_models_with_texts_and_an_end_of_text(self):
        model = tiny(vocab=97, hidden=32, layers=1, eos=3, dtype=torch.float32)
        words = tokenizer()
        found = load_subject(
            model, draft_of(model, "near"), ["ab", "a longer one"], tokenizer=words, draft_tokenizer=words
        )
        assert [len(prompt) for prompt in found.prompts] == [2, 12]
        assert (found.eos, found.pad) == ([3], 0)
        point = measure.measure_point(
            found, check_schemes("lossless:num_draft_tokens=2"), batch=2, new_tokens=6, repeats=1, only_wanted=True
        )
        assert [row["matched"] for row in point["rows"] if row["mode"] == "greedy"] == [[2, 2], [2, 2]]
        assert point["skipped"] == {}

    def test_the_command_on_two_folders(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        for name in ("target", "draft"):
            tiny(layers=1, dtype=torch.float32).save_pretrained(tmp_path / name)
            tokenizer().save_pretrained(tmp_path / name)
        (tmp_path / "prompts.txt").write_text("one and one\ntwo\n")
        pair = ["--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--device", "cpu"]
        options = ["--prompts", str(tmp_path / "prompts.txt"), "--schemes", "own=lossless:num_draft_tokens=2"]
        options += ["--batch", "2", "--new-tokens", "4", "--repeats", "1", "--out", str(tmp_path / "out")]
        assert cli.main(["bench", *pair, *options]) == 0
        out = capsys.readouterr().out
        assert "HF prompt lookup" in out
        assert "agreement of the argmaxes 1.00" in out
        stored = json.loads((tmp_path / "out" / "bench.json").read_text())
        assert stored["meta"]["run"]["pair"]["prompts"] == ["one and one", "two"]
        assert stored["meta"]["command"].startswith("hf-semspec bench --model ")
        own = next(row for row in stored["points"][0]["rows"] if row["name"] == "own")
        assert own["matched"] == [2, 2]
        assert own["acceptance"] == 1.0

    def test_a_draft_of_another_tokenizer_is_measured_where_it_can_be(self):
        model, draft = (tiny(vocab=97, layers=1, seed=seed, dtype=torch.float32) for seed in (0, 1))
        found = load_subject(model, draft, ["ab"], tokenizer=tokenizer(), draft_tokenizer=tokenizer(permute=3))
        wanted = check_schemes("own=smc")
        point = measure.measure_point(found, wanted, batch=1, new_tokens=4, repeats=1, optional=["own"])
        assert "own" in point["skipped"]
        assert point["agreement"] == {"greedy": None, "sampling": None}
        assert {PLAIN, "HF prompt lookup"} <= {row["name"] for row in point["rows"]}
        assert all(row["predicted"] is None for row in point["rows"])
        with pytest.raises(ValueError, match="contender 'own'"):
            measure.measure_point(found, wanted, batch=1, new_tokens=4, repeats=1, only_wanted=True)


class TestIntervals:
    def entry(self, seconds, name="x"):
        way = Way(name, "lossless", "greedy", True, False, lambda batch, tokens: None)
        return Entry(way, [Sample(0, 10, each, [[1]]) for each in seconds])

    def test_ratios_pair_the_runs_of_a_turn(self):
        # The machine slows down by half from turn to turn, and the ratio stays what it is.
        plain, ours = self.entry([1.0, 2.0, 4.0, 8.0]), self.entry([0.5, 1.0, 2.0, 4.0])
        row = describe_entry(ours, plain, None, plain)
        assert row["over_plain"] == {"value": 2.0, "interval": None}
        assert row["over_assisted"] is None
        mixed = describe_entry(self.entry([4.0, 2.0, 1.0, 0.5]), plain, plain, plain)
        assert mixed["over_plain"]["interval"] is not None

    def test_the_interval_is_the_bootstrap_of_the_median(self):
        plain = self.entry([1.0] * 9)
        times = [0.5, 0.6, 0.4, 0.8, 0.55, 0.45, 0.7, 0.52, 0.61]
        found = describe_entry(self.entry(times), plain, None, plain)["over_plain"]
        ratios = [1 / each for each in times]
        assert tuple(found["interval"]) == bootstrap(ratios, numpy.median)
        assert tuple(found["interval"]) != bootstrap(ratios)  # the mean's is another
        draws = numpy.random.default_rng(1).choice(ratios, size=(4000, 9))
        quantiles = numpy.quantile(numpy.median(draws, axis=1), [0.025, 0.975])
        assert found["interval"] == pytest.approx(list(quantiles), abs=0.05)

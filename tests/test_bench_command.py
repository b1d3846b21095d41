"""`bench`, `check`, the sweeps and their page: what they measure adds up, goes on after an interruption, and is
refused with a reason before anything is loaded."""

import json
import re
import statistics
import sys

import numpy
import pytest
import torch

from hf_semspec import cli
from hf_semspec.bench import Size, bench, check, controlled_pair, function, measure, page, profiling, request, sweeps
from hf_semspec.bench.accounting import accounted, peak_memory
from hf_semspec.bench.command import main
from hf_semspec.bench.measure import Entry, Sample, describe_entry
from hf_semspec.bench.rivals import PLAIN, Way, check_schemes, has_ensembles
from hf_semspec.bench.sizes import LLAMA_8B, SIZES, size_by_name
from hf_semspec.bench.subject import controlled_subject, load_subject, read_prompts
from hf_semspec.evaluation.statistics import bootstrap
from hf_semspec.tools.pages import marks

from .models import draft_of, tiny, tokenizer

SMALL = Size(layers=1, hidden=64, intermediate=64, heads=2)
PAIR = {"controlled": 0.7, "target_size": SMALL, "draft_size": SMALL, "vocab": 200}
SCHEMES = ("own=lossless:num_draft_tokens=3", "smc:num_particles=2,num_draft_tokens=3")
RUN = {"schemes": SCHEMES, "batches": (2, 1), "new_tokens": 8, "repeats": 2, "alone": 1}
# Stock's assisted generation makes calls that transformers itself reports as deprecated.
pytestmark = [pytest.mark.deprecated, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return bench(**PAIR, **RUN, out=tmp_path_factory.mktemp("bench"), command="the command")


@pytest.fixture(scope="module")
def subject():
    return controlled_subject(0.7, target_size=SMALL, draft_size=SMALL, vocab=200)


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


class TestAccounting:
    def test_forwards_are_counted_and_forward_is_put_back(self, subject):
        given = subject.batch(1, 0)
        with accounted(subject.model, subject.draft) as account:
            subject.model.generate(given.ids, attention_mask=given.mask, max_new_tokens=5, do_sample=False)
            subject.draft(given.ids)
        assert (account.target.calls, account.target.tokens) == (5, 16 + 4)
        assert (account.draft.calls, account.draft.tokens) == (1, 16)
        assert 0 < account.target.seconds + account.draft.seconds <= account.seconds
        with pytest.raises(KeyError), accounted(subject.model, subject.draft):
            raise KeyError
        assert "forward" not in vars(subject.model)
        assert "forward" not in vars(subject.draft)

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
    def test_peak_memory_is_what_the_block_took_whatever_ran_before(self):
        megabytes = []
        for size in (40, 40, 10):
            with peak_memory(torch.device("cpu")) as peak:
                held = [torch.ones(size, 1000, 25) for _ in range(10)]
                del held
            megabytes.append(peak.value / 1e6)
        assert megabytes == pytest.approx([40, 40, 10], abs=4)


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

    def test_rounds_of_every_scheme(self, subject):
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
    def test_an_interrupted_sweep_goes_on_and_makes_the_page(self, tmp_path, measured, monkeypatch):
        asked = []

        def point(subject, wanted, *, batch, tuned=None, **kwargs):
            asked.append((subject.about["controlled"], batch, tuned))
            return measured.points[0] | {"batch": batch}

        monkeypatch.setattr(sweeps, "measure_point", point)
        small = sweeps.replace(
            sweeps.quick("pairs"), target=SMALL, draft=SMALL, vocab=200, agreements=(0.5, 0.65), batches=(1, 2)
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
                target=SMALL,
                draft=SMALL,
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


class TestCheck:
    @pytest.fixture(scope="class")
    def advice(self):
        return check(**PAIR, new_tokens=16, repeats=1, blocks=8, widths=(1, 4), batches=(1, 2))

    def test_agreement_is_near_what_was_asked(self, advice):
        for mode in ("greedy", "sampling"):
            assert advice.agreement[mode].greedy == pytest.approx(0.7, abs=0.06)
            assert advice.agreement[mode].positions == 8 * 32
        assert advice.vocabulary == {"kind": "same", "sizes": [200, 200], "note": "200 ids"}

    def test_all_of_it_is_json(self, advice):
        stored = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
        assert stored["chi2"].keys() == {"1", "2", "4", "8", "16"}
        assert {(role, rows, width) for role, rows, width, _ in stored["costs"]} == advice.seconds.keys()
        assert advice.seconds.keys() == {(r, b, w) for r in ("target", "draft") for b in (1, 2) for w in (1, 4)}
        assert {entry["batch"] for entry in stored["forecasts"]} == {1, 2}

    def test_the_command_prints_tables_and_writes_json(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "150")
        sizes = ["--target-size", "1x64x64x2", "--draft-size", "1x64x64x2", "--vocab", "64"]
        options = ["--controlled", "0.5", *sizes, "--new-tokens", "4", "--repeats", "1", "--blocks", "2"]
        assert cli.main(["check", *options, "--out", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert "64 ids" in out
        assert "one forward, milliseconds" in out
        stored = json.loads((tmp_path / "check.json").read_text())
        assert stored["meta"]["command"].startswith("hf-semspec check --controlled 0.5")


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "nothing to measure"),
            (["--model", "m"], "--draft is missing"),
            (["--draft", "d"], "--model is missing"),
            (["--model", "m", "--draft", "d", "--controlled", "0.5"], "--controlled makes both models"),
            (["--controlled", "1.5"], r"--controlled 1.5: must be in \[0, 1\]"),
            (["--controlled", "0.5", "--prompts", "x"], "a controlled pair has ids"),
            (["--controlled", "0.5", "--target-size", "huge"], "--target-size huge: must be one of 98M"),
            (["--controlled", "0.5", "--draft-size", "1x10x10x3"], "--draft-size 1x10x10x3: the hidden size"),
            (["--controlled", "0.5", "--draft-size", "1x16x16x4/3"], "heads of keys and values"),
            (["--controlled", "0.5", "--vocab", "2"], "`vocab` must be an int >= 4"),
            (["--controlled", "0.5", "--logit-scale", "0"], "--logit-scale 0.0"),
            (["--controlled", "0.5", "--batch", "one"], "--batch one: must be whole numbers"),
            (["--controlled", "0.5", "--batch", "0"], "`batch` must be an int in"),
            (["--controlled", "0.5", "--batch", ","], "`batch` must name at least one"),
            (["--controlled", "0.5", "--new-tokens", "1"], "`new_tokens` must be an int >= 2"),
            (["--controlled", "0.5", "--repeats", "0"], "`repeats`"),
            (["--controlled", "0.5", "--alone", "0"], "`alone`"),
            (["--controlled", "0.5", "--schemes", "losless"], "did you mean `lossless`"),
            (["--controlled", "0.5", "--schemes", "lossless:num_draft_tokens=99"], "num_draft_tokens"),
            (["--controlled", "0.5", "--schemes", "majority"], "majority is not a way to decode faster"),
            (["--controlled", "0.5", "--schemes", "plain=lossless"], "'plain': the name is that of a rival"),
            (["--controlled", "0.5", "--dtype", "float3"], "--dtype float3"),
            (["--controlled", "0.5", "--device", "warp"], "--device warp"),
            (["--model", "m", "--draft", "d", "--prompts", "nowhere.txt"], "--prompts nowhere.txt"),
            (["--goals", "--sweep", "pairs", "--out", "x"], "exclude each other"),
            (["--sweep", "pairs"], "pass --out DIR"),
            (["--page", "x"], "pass --out DIR"),
            (["--sweep", "pairs", "--out", "x", "--minutes", "0"], "--minutes 0.0: must be > 0"),
        ],
    )
    def test_before_anything_is_loaded(self, arguments, message, capsys, monkeypatch):
        monkeypatch.setattr(request.PairRequest, "load", lambda *args, **kwargs: pytest.fail("loaded"))
        monkeypatch.setattr(sweeps, "controlled_subject", lambda *args, **kwargs: pytest.fail("loaded"))
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(message, error)

    @pytest.mark.parametrize("option", ["new_tokens", "repeats", "blocks"])
    def test_of_the_advisor(self, option, monkeypatch):
        monkeypatch.setattr(request.PairRequest, "load", lambda *args, **kwargs: pytest.fail("loaded"))
        with pytest.raises(ValueError, match=option):
            check(controlled=0.5, **{option: 0})

    def test_without_what_it_draws_with_the_error_names_the_extra(self, monkeypatch):
        monkeypatch.setattr(request, "find_spec", lambda name: None if name == "scipy" else object())
        with pytest.raises(ImportError, match=r'scipy: pip install "hf-semspec\[bench\]"'):
            bench(controlled=0.5)

    def test_prompts_of_a_file(self, tmp_path):
        lines, entries = tmp_path / "a.txt", tmp_path / "b.jsonl"
        lines.write_text("one\n\n two\n")
        entries.write_text('{"prompt": "x\\ny"}\n')
        assert read_prompts(lines) == ["one", " two"]
        assert read_prompts(entries) == ["x\ny"]
        for content in ("", '{"question": "x"}', "not json"):
            entries.write_text(content)
            with pytest.raises(ValueError, match=r"b\.jsonl"):
                read_prompts(entries)


class TestPairsOfAnySize:
    def test_sizes_by_name_or_by_shape(self):
        assert size_by_name("--x", "llama-3.1-8b") is LLAMA_8B is SIZES["llama-3.1-8b"]
        assert size_by_name("--x", "2x64x96x4/2") == Size(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_grouped_heads_and_half_precision_keep_the_cycle(self, dtype):
        size = Size(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab=160)
        pair = controlled_pair(0.6, target_size=size, draft_size=size, dtype=dtype)
        assert pair.model.dtype == dtype
        assert pair.model.config.num_key_value_heads == 2
        text = pair.cycle[None]
        following = pair.model(text).logits[0].argmax(-1)
        assert torch.equal(following, pair.cycle.roll(-1))
        assert pair.measure(text).greedy == pytest.approx(0.6, abs=0.02)
        # The norms and the rotary table are not left as the memory they were made in.
        assert all(bool((p == 1).all()) for p in pair.model.parameters() if p.dim() == 1)
        assert pair.model.model.rotary_emb.inv_freq[0] == 1

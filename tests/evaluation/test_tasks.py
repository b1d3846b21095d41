"""What is asked and how it is checked; how contenders and grids are written."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_semspec import EASDConfig
from hf_semspec.evaluation import Contender, Example, Task, gsm8k, jsonl
from hf_semspec.evaluation.contenders import parse_contenders, reference_of, split
from hf_semspec.evaluation.grids import parse_grid
from hf_semspec.evaluation.tasks import GSM8K_TEMPLATE, by_pattern, last_number, task_by_name

GSM8K_LINES = [
    {"question": "How many?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "How much profit?", "answer": "He made 1,000 and 200.\n#### 1,200"},
    {"question": "Change?", "answer": "down\n#### -3"},
]


def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


class TestLastNumber:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("so 18", "18"),
            ("The answer is $1,234.50.", "1234.5"),
            ("#### 70000", "70000"),
            ("1,000,000 in all", "1000000"),
            ("a list: 3,5", "5"),
            ("18.", "18"),
            ("18...", "18"),
            ("**42**", "42"),
            ("16-3", "3"),
            ("5-$3", "3"),
            ("(5)-3", "3"),
            ("it fell to -7", "-7"),
            ("it fell by -$7.20 today", "-7.2"),
            ("\N{MINUS SIGN}7", "-7"),
            ("-0", "0"),
            ("costs $ 18", "18"),
            ("10%", "10"),
            (".5 of it", "0.5"),
            ("007", "7"),
            ("100", "100"),
            ("none at all", None),
            ("", None),
        ],
    )
    def test_by_hand(self, text, number):
        assert last_number(text) == number

    @given(
        value=st.decimals(-(10**9), 10**9, places=2),
        before=st.text(alphabet="abc ,.$\n12", max_size=12),
        after=st.sampled_from(["", ".", "...", " dollars.", "%", "**", ",", "\n", ") "]),
        dollar=st.booleans(),
        commas=st.booleans(),
    )
    def test_any_number_is_found_however_it_is_dressed(self, value, before, after, dollar, commas):
        digits = f"{abs(value):,f}" if commas else f"{abs(value):f}"
        text = f"{before} = {'-' if value < 0 else ''}{'$' if dollar else ''}{digits}{after}"
        assert Decimal(last_number(text)) == value

    @given(st.text())
    def test_any_text_gives_a_plain_number_or_none(self, text):
        number = last_number(text)
        assert number is None or last_number(number) == number


class TestPattern:
    def test_the_last_match_counts_by_its_first_group(self):
        assert by_pattern(r"#(\d+)")("#12 and #34 then 56") == "34"

    def test_without_groups_the_match_counts(self):
        assert by_pattern(r"\d+")("1 22 ") == "22"

    def test_lines_are_lines(self):
        assert by_pattern(r"^A: (.*)$")("A: one \nB: two") == "one"

    def test_no_match_is_no_answer(self):
        assert by_pattern(r"#(\d+)")("12") is None

    def test_a_group_that_took_no_part_is_no_answer(self):
        assert by_pattern(r"x(\d)?")("x") is None

    def test_no_pattern(self):
        with pytest.raises(ValueError, match=r"--extract.*regular expression"):
            by_pattern("(")


class TestFiles:
    def test_gsm8k(self, tmp_path):
        task = gsm8k(write(tmp_path / "g.jsonl", [*GSM8K_LINES, ""]))
        assert [example.answer for example in task.examples] == ["4", "1200", "-3"]
        assert task.question(0) == GSM8K_TEMPLATE.replace("{prompt}", "How many?")
        assert task.grade(1, "He made $1,200.00.") == ("1200", True)
        assert task.grade(1, "He made 200") == ("200", False)
        assert task.grade(1, "no idea") == (None, False)

    def test_jsonl_compares_the_whole_text_or_what_the_pattern_finds(self, tmp_path):
        path = write(
            tmp_path / "t.jsonl", [{"prompt": "1+1=", "answer": " 2 ", "steps": 1}, {"prompt": "x", "answer": 7}]
        )
        task = jsonl(path)
        assert task.grade(0, " 2\n") == ("2", True)
        assert task.grade(0, "1+1=2")[1] is False
        assert task.grade(1, "7") == ("7", True)
        assert jsonl(path, extract="=(.)").grade(0, "1+1=2") == ("2", True)
        assert jsonl(path, template="Q: {prompt}{x}").question(0) == "Q: 1+1={x}"

    def test_a_line_separator_inside_a_text_ends_no_line(self, tmp_path):
        path = tmp_path / "t.jsonl"
        path.write_text('{"prompt": "a\N{LINE SEPARATOR}b", "answer": "c"}\n', encoding="utf-8")
        assert jsonl(path).examples[0].prompt == "a\N{LINE SEPARATOR}b"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2: not JSON"),
            ("[1]", "line 2: must be an object"),
            ('{"prompt": "x"}', 'line 2: lacks "answer"; it has "prompt"'),
            ('{"prompt": "x", "answer": null}', 'line 2: "answer" must be text or a number'),
            ('{"prompt": "x", "answer": true}', 'line 2: "answer" must be text or a number'),
        ],
    )
    def test_bad_lines_are_named(self, tmp_path, line, message):
        path = write(tmp_path / "t.jsonl", [{"prompt": "x", "answer": "y"}, line])
        with pytest.raises(ValueError, match=message):
            jsonl(path)

    def test_an_answer_without_its_mark_is_named(self, tmp_path):
        path = write(tmp_path / "g.jsonl", [GSM8K_LINES[0], {"question": "x", "answer": "12"}])
        with pytest.raises(ValueError, match=r"line 2: .*#### NUMBER"):
            gsm8k(path)

    def test_an_empty_file_and_a_file_of_bytes(self, tmp_path):
        with pytest.raises(ValueError, match="no examples"):
            jsonl(write(tmp_path / "t.jsonl", []))
        (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="UTF-8"):
            jsonl(tmp_path / "b")

    def test_a_template_must_hold_the_problem(self, tmp_path):
        with pytest.raises(ValueError, match=r"--template.*\{prompt\}"):
            jsonl(write(tmp_path / "t.jsonl", [{"prompt": "x", "answer": "y"}]), template="Q: {question}")

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("gsm9k", {}, 'must be one of "gsm8k", "jsonl"'),
            ("jsonl", {"path": None}, "--path FILE"),
            ("gsm8k", {"extract": "x"}, "--extract is for --task jsonl"),
        ],
    )
    def test_bad_tasks(self, tmp_path, name, arguments, message):
        given = {"path": write(tmp_path / "g.jsonl", GSM8K_LINES), "extract": None, "template": None, **arguments}
        with pytest.raises(ValueError, match=message):
            task_by_name(name, given.pop("path"), **given)

    def test_the_first_examples_and_what_tells_tasks_apart(self):
        task = Task(name="t", examples=tuple(Example(c, c) for c in "abc"), extract=str.strip, check=str.__eq__)
        assert [example.prompt for example in task.first(2).examples] == ["a", "b"]
        assert task.first(None) is task
        assert task.describe()["sha256"] != task.first(2).describe()["sha256"]


class TestContenders:
    def test_a_list_as_the_issue_writes_it(self):
        names = [one.name for one in parse_contenders("target,draft,lossless,easd,smc")]
        assert names == ["target", "draft", "lossless", "easd", "smc"]

    def test_options_go_on_until_the_next_contender(self):
        one, two, three = parse_contenders("target,easd:penalty=1,trigger=random,trigger_rate=0.03,smc")
        assert (one.kind, two.kind, three.kind) == ("target", "easd", "smc")
        assert two.options == {"penalty": 1, "trigger": "random", "trigger_rate": 0.03}
        assert two.name == "easd:penalty=1,trigger=random,trigger_rate=0.03"

    def test_names(self):
        _, two, three = parse_contenders(["target", "mine=easd:penalty=1,n4=lossless:num_chains=4"])
        assert (two.name, two.kind) == ("mine", "easd")
        assert (three.name, three.options) == ("n4", {"num_chains": 4})
        assert parse_contenders("plain=lossless")[1].name == "plain"

    def test_nested_values(self):
        text = 'easd:calibrated_for={"do_sample": false, "top_k": 3},target_entropy_threshold=inf'
        options = parse_contenders(text)[1].options
        assert options == {
            "calibrated_for": {"do_sample": False, "top_k": 3},
            "target_entropy_threshold": float("inf"),
        }

    @pytest.mark.parametrize(
        "value", ["{easd:penalty=0.5,num_draft_tokens=3}", '{"scheme": "easd", "penalty": 0.5, "num_draft_tokens": 3}']
    )
    def test_a_scheme_as_a_value(self, value):
        from hf_semspec.evaluation.contenders import read_value

        assert read_value(value) == EASDConfig(penalty=0.5, num_draft_tokens=3)

    def test_split_is_blind_inside_brackets_and_quotes(self):
        assert split('a,{b,c},"d,e",[f,(g,h)]', ",") == ["a", "{b,c}", '"d,e"', "[f,(g,h)]"]
        assert split("a:b:c", ":", 1) == ["a", "b:c"]

    def test_the_target_is_always_there(self):
        assert [one.name for one in parse_contenders("lossless")] == ["target", "lossless"]
        hot = parse_contenders("hot=target:repetition_penalty=1.2")
        assert reference_of(hot) == Contender("target", "target")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("lossles", "unknown contender 'lossles'; did you mean `lossless`"),
            ("easd:penalti=1", "did you mean `penalty`"),
            ("easd:penalty=2", "contender 'easd:penalty=2': `penalty` must be a number in \\[0, 1\\]"),
            ("easd:penalty", "'penalty': must be NAME=VALUE"),
            ("best_of:n=0", "`n` must be an int in \\[1, 64\\]"),
            ("majority:temprature=1", "unknown option 'temprature'; did you mean `temperature`"),
            ("assisted:num_draft_tokens=x", "num_draft_tokens"),
            ("smc:vote=loudest", '`vote` must be one of "majority", "weighted"'),
            ("smc:do_sample=false", "do_sample"),
            ("lossless:temperature=0", "`temperature` must be a number > 0"),
            ("lossless:max_new_tokens=5", "max_new_tokens is the same for all"),
            ("easd,easd", "two contenders are called 'easd'"),
            ("target=lossless", "'target' is the name of the plain target"),
        ],
    )
    def test_bad_contenders(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse_contenders(text)

    def test_what_draws(self):
        def draws(text, temperature=None):
            return parse_contenders(text)[-1].draws(temperature)

        assert not any(draws(text) for text in ("target", "draft", "lossless", "easd", "assisted"))
        assert all(draws(text, 0.7) for text in ("target", "draft", "lossless", "easd", "assisted"))
        assert all(draws(text) for text in ("smc", "best_of", "majority", "lossless:temperature=0.5"))
        assert draws("easd:trigger=random,trigger_rate=0.1")

    def test_all_face_one_law(self):
        law = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
        for one in parse_contenders("target,draft,lossless,easd,smc,assisted,best_of,majority"):
            assert one.sampling(0.7) == law
        assert parse_contenders("smc")[1].sampling(None) == law | {"temperature": 1.0}
        assert parse_contenders("smc:temperature=0.5,top_k=9")[1].sampling(0.7) == law | {
            "temperature": 0.5,
            "top_k": 9,
        }

    def test_resolved_options_are_whole_and_json(self):
        resolved = parse_contenders("easd:target_entropy_threshold=inf")[1].resolved(0.7)
        assert json.loads(json.dumps(resolved)) == resolved
        assert (resolved["scheme"], resolved["penalty"], resolved["temperature"]) == ("easd", 0.0, 0.7)
        assert parse_contenders("best_of")[1].resolved(None)["n"] == 4


class TestGrids:
    def test_all_combinations_last_axis_fastest(self):
        grid = parse_grid("smc:num_particles=1|4,ess_threshold=0.3,num_draft_tokens=4|8|16")
        assert grid.axes == {"num_particles": ["1", "4"], "num_draft_tokens": ["4", "8", "16"]}
        assert grid.fixed == {"ess_threshold": 0.3}
        cells = grid.contenders()
        assert [one.name for one in cells][:2] == [
            "smc:num_particles=1,num_draft_tokens=4",
            "smc:num_particles=1,num_draft_tokens=8",
        ]
        assert cells[-1].options == {"ess_threshold": 0.3, "num_particles": 4, "num_draft_tokens": 16}

    def test_a_name_of_its_own(self):
        grid = parse_grid("best=smc:select=best,num_particles=1|4")
        assert (grid.name, grid.kind, grid.contenders()[0].name) == ("best", "smc", "best:num_particles=1")

    def test_the_table_finds_its_cells(self):
        grid = parse_grid("easd:penalty=0|1,top_n=5|10")
        rows = [
            {"name": one.name, "accuracy": i / 10, "speed_ratio": i, "interval": [0, 1]}
            for i, one in enumerate(grid.contenders())
        ]
        table = grid.table([{"name": "target"}, *reversed(rows)])
        assert [(cell["values"], cell["accuracy"], cell["speed_ratio"]) for cell in table["cells"]] == [
            (["0", "5"], 0.0, 0),
            (["0", "10"], 0.1, 1),
            (["1", "5"], 0.2, 2),
            (["1", "10"], 0.3, 3),
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("smc", "give one to 3"),
            ("smc:num_particles=4", "give one to 3"),
            ("smc:num_particles=1|1", "has a value twice"),
            ("smc:num_particles", "must be NAME=VALUE"),
            ("smc:num_particles=0|1", "num_particles"),
            ("scm:num_particles=1|2", "did you mean `smc`"),
        ],
    )
    def test_bad_grids(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse_grid(text)

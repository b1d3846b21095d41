"""γ by itself: the estimates, the table of costs, the choice, what a profile must be; and played calls, whose regret
against the best fixed γ in hindsight is bounded."""

import itertools
import json
import math
from typing import Any

import pytest

from hf_semspec import LosslessConfig, SemSpecConfig
from hf_semspec.bench.simulation import played, regret
from hf_semspec.engine.costs import CostTable
from hf_semspec.engine.gamma import CHOICES, ChosenLength, FixedLength, Survival

PROFILE: dict[str, Any] = {"target": [[1, 1, 1.0], [1, 9, 1.5]], "draft": [[1, 0.1]]}


class TestSurvival:
    def test_it_comes_to_what_it_sees(self) -> None:
        survival = Survival()
        for turn in range(400):
            survival.forget()
            survival.observe(4, (0, 1, 4, 4)[turn % 4])
        assert survival.curve()[:4] == pytest.approx([0.75, 0.5, 0.5, 0.5], abs=0.08)

    def test_it_begins_hopeful_and_less_sure_with_depth(self) -> None:
        curve = Survival().curve()
        assert curve[0] == pytest.approx(Survival.PASSED / (Survival.PASSED + Survival.FAILED))
        assert curve == sorted(curve, reverse=True)
        assert curve[15] > curve[0] ** 16, "one that stands makes the next more likely"

    def test_a_row_that_was_drafted_less_says_nothing_of_what_is_behind(self) -> None:
        one, other = Survival(), Survival()
        one.observe(2, 2)
        other.observe(16, 2)
        assert one.curve()[2] > other.curve()[2]

    def test_old_rounds_are_forgotten(self) -> None:
        survival = Survival()
        for kept in [4] * 200 + [0] * 100:
            survival.forget()
            survival.observe(4, kept)
        assert survival.curve()[0] < 0.15


class TestCosts:
    def test_between_and_beyond_what_was_measured(self) -> None:
        table = CostTable.from_dict(
            {"target": [[1, 1, 1.0], [1, 5, 2.0], [3, 1, 3.0], [3, 5, 6.0]], "draft": [[1, 0.1], [3, 0.3]]}
        )
        assert table.curves(1, (1, 3, 5, 9)) == ([1.0, 1.5, 2.0, 3.0], 0.1)
        assert table.curves(2, (1, 3)) == (pytest.approx([2.0, 3.0]), pytest.approx(0.2))
        assert table.curves(9, (1, 5)) == ([3.0, 6.0], 0.3)

    def test_a_spike_does_not_count(self) -> None:
        table = CostTable()
        for seconds in (5.0, 1.0, 1.0, 40.0, 1.0):
            table.add(1, 1, seconds)
        for _ in range(2):
            table.add(1, 4, 2.0)
            table.add_draft(1, 0.1)
        assert table.curves(1, (1, 4)) == ([1.0, 2.0], 0.1)

    def test_a_pass_costs_no_more_than_wider_ones_unless_it_does_every_time(self) -> None:
        table = CostTable()
        for width, seconds in ((1, 1.0), (4, 3.0), (4, 3.0), (6, 2.0), (6, 2.0)):
            table.add(1, width, seconds)
        for _ in range(2):
            table.add(1, 1, 1.0)
            table.add_draft(1, 0.1)
        assert table.curves(1, (4, 5))[0] == [2.0, 2.0]
        for _ in range(3):
            table.add(1, 4, 3.0)
        assert table.curves(1, (4, 5))[0] == [3.0, 2.5]

    def test_what_is_not_known_is_measured_first_and_plain_rounds_anew(self) -> None:
        table = CostTable()
        length = ChosenLength(table)
        assert [self.round_of(length, 8) for _ in range(4)] == [0, 0, 3, 3]
        assert table.wanted(8) is table.wanted(5) is None
        assert table.wanted(4) == 0, "half the rows are another matter"
        for _ in range(CostTable.FRESH):
            table.add(8, 4, 1.0)
        assert table.wanted(8) == 0

    def round_of(self, length: ChosenLength, rows: int) -> int:
        picked = length.pick(rows)
        length.costs.add(rows, picked + 1, 1 + 0.1 * picked)
        if picked:
            length.costs.add_draft(rows, 0.1)
        return picked

    def test_a_table_gives_its_profile_back(self) -> None:
        table = CostTable.from_dict(json.loads(json.dumps(PROFILE)))
        assert table.to_dict() == PROFILE
        assert table.wanted(64) is None


class TestChoice:
    def choices(self, acceptance: float, draft: float, rounds: int = 400, wide: float = 1.5) -> list[int]:
        """γ of every round of one long row in which that share of drafted tokens stands, evenly."""
        length = ChosenLength(CostTable.from_dict({"target": [[1, 1, 1.0], [1, 9, wide]], "draft": [[1, draft]]}))
        found, owed = [], 0.0
        for _ in range(rounds):
            picked, kept = length.pick(1), 0
            while kept < picked and (owed := owed + acceptance) >= 1:
                owed, kept = owed - 1, kept + 1
            found.append(picked)
            length.observe([(picked, kept)] if picked else [])
        return found

    @pytest.mark.parametrize(("acceptance", "draft", "few", "many"), [(0.5, 0.05, 1, 4), (0.9, 0.02, 6, 16)])
    def test_it_settles(self, acceptance: float, draft: float, few: int, many: int) -> None:
        late = self.choices(acceptance, draft)[200:]
        assert few <= min(late) <= max(late) <= many
        changes = sum(one != other for one, other in itertools.pairwise(late))
        assert changes <= 20

    def test_a_draft_that_costs_too_much_is_tried_more_and_more_rarely(self) -> None:
        choices = self.choices(0.1, 0.8, rounds=4000)
        tries = [i for i, picked in enumerate(choices) if picked and i > 20]
        gaps = [other - one for one, other in itertools.pairwise(tries)]
        assert len(tries) >= 3
        assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(gaps))

    def test_a_fixed_length_is_itself(self) -> None:
        assert [FixedLength(number).pick(3) for number in (1, 5, 64)] == [1, 5, 64]

    def test_all_take_what_they_agree_on(self) -> None:
        told: list[int] = []

        def agree(choice: int) -> int:
            told.append(choice)
            return 7

        length = ChosenLength(CostTable.from_dict(PROFILE), agree)
        assert (length.pick(1), length.rounds) == (7, {7: 1})
        assert told and told[0] in CHOICES


# Played calls.


def costs(draft: float, wide: float) -> tuple[Any, Any, dict[str, Any]]:
    """c and ρ of rows and widths, where a pass over nine tokens costs `wide` steps; and their profile."""

    def target(rows: int, width: int) -> float:
        return (1 + (wide - 1) * (width - 1) / 8) * (1 + rows / 16)

    def step(rows: int, width: int) -> float:
        return draft * (1 + rows / 16)

    sizes, widths = (1, 2, 4, 8, 16), (1, 2, 3, 5, 9, 17)
    passes = [[rows, width, target(rows, width)] for rows in sizes for width in widths]
    return target, step, {"target": passes, "draft": [[rows, step(rows, 1)] for rows in sizes]}


def regret_of(
    agreement: float, draft: float, wide: float, *, batch: int, tokens: int, calls: int, later: float | None = None
) -> float:
    target, step, profile = costs(draft, wide)
    table = CostTable.from_dict(profile)

    def acceptance(place: int) -> float:
        return agreement if later is None or place < tokens // 2 else later

    return regret(
        acceptance, target, step, lambda: ChosenLength(table), batch=batch, tokens=tokens, seeds=range(calls)
    )


@pytest.mark.parametrize(("agreement", "draft", "wide"), [(0.3, 0.3, 1.05), (0.6, 0.1, 1.5), (0.95, 0.02, 1.05)])
@pytest.mark.parametrize(("batch", "tokens", "calls"), [(1, 128, 40), (4, 128, 12)])
def test_a_call_takes_hardly_longer_than_at_the_best_length(
    agreement: float, draft: float, wide: float, batch: int, tokens: int, calls: int
) -> None:
    assert regret_of(agreement, draft, wide, batch=batch, tokens=tokens, calls=calls) <= 0.03


def test_so_does_one_whose_acceptance_changes_half_way() -> None:
    for first, later in ((0.3, 0.9), (0.9, 0.3)):
        assert regret_of(first, 0.3, 1.2, batch=1, tokens=512, calls=4, later=later) <= 0.03


def test_a_choice_that_believes_in_free_passes_is_seen() -> None:
    """The control: what a pass and a draft forward cost decides."""
    target, step, profile = costs(0.3, 2.5)
    free = {"target": [[1, 1, 1.0], [1, 17, 1.0]], "draft": [[1, 0.02]]}
    common: dict[str, Any] = {"batch": 1, "tokens": 128, "seeds": range(8)}
    right, wrong = CostTable.from_dict(profile), CostTable.from_dict(free)
    assert regret(lambda _: 0.6, target, step, lambda: ChosenLength(right), **common) <= 0.03
    assert regret(lambda _: 0.6, target, step, lambda: ChosenLength(wrong), **common) > 0.2


def test_measured_costs_serve_as_well_as_given_ones() -> None:
    """From the second call on; with rounds that take up to a third longer than they should."""
    target, step, _ = costs(0.1, 1.5)
    table = CostTable()
    common: dict[str, Any] = {"batch": 1, "noise": 0.3}
    played(ChosenLength(table), lambda _: 0.8, target, step, tokens=64, seed=99, **common)
    assert (
        regret(lambda _: 0.8, target, step, lambda: ChosenLength(table), tokens=256, seeds=range(20), **common) <= 0.04
    )


GRID = list(itertools.product((0.3, 0.5, 0.65, 0.8, 0.95), (0.02, 0.1, 0.3, 0.7), (1.05, 1.5, 2.5)))


@pytest.mark.grid
@pytest.mark.parametrize(("agreement", "draft", "wide"), GRID)
@pytest.mark.parametrize(
    ("batch", "tokens", "calls"), [(1, 64, 300), (4, 64, 80), (16, 64, 32), (1, 256, 80), (4, 256, 24), (16, 256, 12)]
)
def test_a_call_takes_hardly_longer_than_at_the_best_length_grid(
    agreement: float, draft: float, wide: float, batch: int, tokens: int, calls: int
) -> None:
    """In 64 tokens there is not always time to find out."""
    found = regret_of(agreement, draft, wide, batch=batch, tokens=tokens, calls=calls)
    assert found <= (0.045 if tokens == 64 else 0.03)


BAD: list[tuple[Any, str]] = [
    ([], "has other entries or is no dict"),
    ({"target": [[1, 1, 1.0]]}, "has other entries"),
    ({**PROFILE, "more": 1}, "has other entries"),
    ({**PROFILE, "pair": 3}, '"pair" is no dict'),
    ({**PROFILE, "target": [[1, 1.0]]}, '"target" is no list of lists of 3 numbers'),
    ({**PROFILE, "draft": 0.1}, '"draft" is no list of lists of 2 numbers'),
    ({**PROFILE, "draft": [[1, math.nan]]}, '"draft" holds'),
    ({**PROFILE, "draft": [[1, math.inf]]}, '"draft" holds'),
    ({**PROFILE, "draft": [[1, 0.0]]}, '"draft" holds'),
    ({**PROFILE, "draft": [[0, 0.1]]}, '"draft" holds'),
    ({**PROFILE, "target": [[1, 1, 1.0], [1, True, 1.0]]}, '"target" holds'),
    ({**PROFILE, "target": [[1, 1, 1.0], [1, 4, "1"]]}, '"target" holds'),
    ({**PROFILE, "target": [[1, 1, 1.0], [2, 4, 1.0]]}, "for no number of rows"),
]


@pytest.mark.parametrize(("profile", "reason"), BAD)
def test_what_is_no_profile_is_refused(profile: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"`cost_profile` must be .*{reason}"):
        LosslessConfig(num_draft_tokens="auto", cost_profile=profile)


def test_a_profile_is_stored_and_is_nobody_elses(tmp_path: Any) -> None:
    given = json.loads(json.dumps(PROFILE))
    config = SemSpecConfig("lossless", num_draft_tokens="auto", cost_profile=given)
    given["target"].clear()
    config.save_pretrained(tmp_path)
    assert SemSpecConfig.from_pretrained(tmp_path).cost_profile == config.cost_profile == PROFILE

"""What a training run is made of; the defaults are the target's."""

from dataclasses import dataclass, field

SHAPES = {
    "target": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4},
    "draft": {"hidden_size": 80, "intermediate_size": 240, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@dataclass
class Settings:
    """What a run is made of; kept in its checkpoint and metrics."""

    role: str
    out: str
    draft: str | None = None  # folder of a trained draft, whose own solutions the target is to judge
    steps: int = 5600
    minutes: float = 90.0
    tokens: int = 2000  # columns a batch
    lr: float = 2e-3
    muon: bool = True  # the layers' matrices are Muon's; else all is AdamW's
    warmup: int = 100
    decay: int = 2000  # the last steps, over which the rate falls to a twentieth
    curriculum: int = 800  # steps until the chains have their full lengths
    judge_from: int = 1200  # the step from which solutions are corrupted and judged; before, writing is learned alone
    mix_from: int = 2200  # the step from which half of a batch is the draft's own writing
    pool: int = 512  # solutions of the draft written at once, and drawn from for fifty steps
    label_weight: float = 1.0  # of the verdicts' mean loss; the characters' mean is over ten times as many
    slip_weight: float = 1.0  # of a throw-away head that marks wrong characters, two layers below the top
    evaluate_every: int = 100
    validation: int = 256
    seed: int = 0
    resume: bool = True
    threads: int = 2
    until_band: bool = True
    shape: dict[str, int] = field(default_factory=dict)

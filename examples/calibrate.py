"""Thresholds of easd and parse from prompts of your task, saved as configs with the report beside them.

python examples/calibrate.py --out calibrated
python examples/calibrate.py --model ID --draft ID --device cuda --prompt TEXT --prompt TEXT ... --out calibrated

Dozens of prompts are a start, hundreds are better; --plots needs hf-semspec[bench].
"""

from pathlib import Path

from pair import LAB_JUDGE, is_lab, load, parser, questions

from hf_semspec import PARSEConfig, SemSpecConfig, calibrate_easd, calibrate_parse
from hf_semspec.hub.sidecar import Sidecar

options = parser(__doc__)
options.add_argument("--count", type=int, default=8, help="problems of the lab to calibrate on")
options.add_argument("--max-new-tokens", type=int, default=64)
options.add_argument("--out", type=Path, required=True)
options.add_argument("--plots", action="store_true")
arguments = options.parse_args()
model, draft, tokenizer = load(arguments)
chats = [[{"role": "user", "content": question}] for question in questions(arguments, arguments.count)]
common = {"tokenizer": tokenizer, "max_new_tokens": arguments.max_new_tokens, "progress": False}

easd = calibrate_easd(model, draft, chats, percentile=90, **common)
base = PARSEConfig(segment_tokens=18, **(LAB_JUDGE if is_lab(arguments) else {}))
parse = calibrate_parse(model, draft, chats, config=base, **common)

for name, calibration in (("easd", easd), ("parse", parse)):
    folder = arguments.out / name
    SemSpecConfig(calibration.config, do_sample=False).save_pretrained(folder)
    made_for = Sidecar(target=arguments.model, draft=arguments.draft, calibration=calibration.report)
    made_for.save_pretrained(folder)
    if arguments.plots:
        calibration.plot(folder / "calibration.png")
print(
    f"easd: H(p) >= {easd.config.target_entropy_threshold:.3f}, H(q) >= {easd.config.draft_entropy_threshold:.3f} nats"
)
print(f"parse: whole answers {parse.config.accept_threshold:.3f}, prefixes {parse.config.prefix_threshold:.3f}")

"""Every scheme beside plain decoding on the same prompts: tokens a target forward, acceptance, seconds, same text.

python examples/compare_schemes.py [--model ID --draft ID --device cuda --prompt TEXT ...]

For accuracy beside speed, with intervals: `hf-semspec eval`.
"""

import time

import torch
from pair import LAB_JUDGE, encode, is_lab, load, parser, questions
from transformers import GenerationConfig

from hf_semspec import SemSpecConfig

options = parser(__doc__)
options.add_argument("--max-new-tokens", type=int, default=64)
arguments = options.parse_args()
model, draft, tokenizer = load(arguments)
judge = LAB_JUDGE if is_lab(arguments) else {}
length = {"max_new_tokens": arguments.max_new_tokens, "return_dict_in_generate": True}
configs = {
    "plain": GenerationConfig(**length, do_sample=False),
    "lossless": SemSpecConfig("lossless", **length, do_sample=False),
    "easd": SemSpecConfig("easd", penalty=1.0, **length, do_sample=False),
    "parse": SemSpecConfig("parse", segment_tokens=18, **judge, **length, do_sample=False),
    "semantic": SemSpecConfig("semantic", scorer="likelihood", segment_stop="\n", **length, do_sample=False),
    "smc": SemSpecConfig("smc", num_particles=4, num_draft_tokens=4, temperature=0.7, **length),
}
batches = [encode(tokenizer, [question], model.device) for question in questions(arguments, 3)]
texts: dict[str, list[list[int]]] = {}
print(f"{'':10}{'tokens':>8}{'a forward':>11}{'accepted':>10}{'seconds':>9}{'same text':>11}")
for name, config in configs.items():
    torch.manual_seed(0)
    tokens = forwards = tested = accepted = 0
    texts[name], start = [], time.perf_counter()
    for inputs in batches:
        scheme = {} if name == "plain" else {"assistant_model": draft, "tokenizer": tokenizer}
        out = model.generate(**inputs, **scheme, generation_config=config)
        new = out.sequences.shape[1] - inputs["input_ids"].shape[1]
        texts[name].append(out.sequences[0].tolist())
        tokens += new
        forwards += new if name == "plain" else out.stats.target_forwards
        if name != "plain":
            tested, accepted = tested + out.stats.tested, accepted + out.stats.accepted
    seconds = time.perf_counter() - start
    rate = f"{accepted / tested:.0%}" if tested else ""
    same = sum(one == two for one, two in zip(texts[name], texts["plain"], strict=True))
    print(f"{name:10}{tokens:8}{tokens / forwards:11.2f}{rate:>10}{seconds:9.2f}{same:>8} of {len(batches)}")

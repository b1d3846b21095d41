"""No small relative at hand: a 4-bit or 8-bit copy of the target drafts for it (needs hf-semspec[quant]).

python examples/quantized_draft.py --quantization nf4
python examples/quantized_draft.py --model ID --device cuda --prompt TEXT
"""

from pair import encode, load, parser, questions

from hf_semspec import SemSpecConfig, load_draft

options = parser(__doc__)
options.add_argument("--quantization", default="nf4", choices=["nf4", "int8"])
arguments = options.parse_args()
model, _, tokenizer = load(arguments)
draft = load_draft(model, quantization=arguments.quantization)

size = {name: one.get_memory_footprint() / 1e6 for name, one in (("target", model), ("draft", draft))}
print(f"target {size['target']:.1f} MB, its {arguments.quantization} copy {size['draft']:.1f} MB")

inputs = encode(tokenizer, questions(arguments), model.device)
config = SemSpecConfig(
    "lossless", num_draft_tokens=4, max_new_tokens=64, do_sample=False, return_dict_in_generate=True
)
out = model.generate(**inputs, assistant_model=draft, generation_config=config)
print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
print(f"{out.stats.acceptance_rate:.0%} accepted, {out.stats.target_forwards} target forwards for {out.stats.emitted}")

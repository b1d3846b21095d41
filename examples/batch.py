"""A padded batch: every row accepts at its own pace, leaves when it has ended, and has statistics of its own.

python examples/batch.py [--model ID --draft ID --device cuda --prompt TEXT --prompt TEXT ...]
"""

from pair import encode, load, parser, questions

from hf_semspec import SemSpecConfig

arguments = parser(__doc__).parse_args()
model, draft, tokenizer = load(arguments)
inputs = encode(tokenizer, questions(arguments, 4), model.device)

config = SemSpecConfig(
    "lossless", num_draft_tokens=4, max_new_tokens=64, do_sample=False, return_dict_in_generate=True
)
out = model.generate(**inputs, assistant_model=draft, generation_config=config)

for text, row in zip(tokenizer.batch_decode(out.sequences, skip_special_tokens=True), out.stats.rows, strict=True):
    print(text)
    print(f"[{row.emitted} tokens in {row.rounds} rounds, {row.acceptance_rate:.0%} accepted]\n")
print(f"{out.stats.emitted} tokens in all by {out.stats.target_forwards} target forwards")

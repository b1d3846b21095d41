"""A chat in the terminal, streamed: tokens appear as they are committed, several at once where drafts are accepted.

python examples/chat.py --say "91-52-08+33-76-97="
python examples/chat.py --model ID --draft ID --device cuda --scheme easd      (then type; an empty line ends it)
"""

from pair import load, parser
from transformers import TextStreamer

from hf_semspec import SemSpecConfig

options = parser(__doc__)
options.add_argument("--scheme", default="lossless", choices=["lossless", "easd"])
options.add_argument("--say", action="append", help="a turn of yours, instead of typing; may be repeated")
arguments = options.parse_args()
model, draft, tokenizer = load(arguments)
config = SemSpecConfig(arguments.scheme, max_new_tokens=256, do_sample=False, return_dict_in_generate=True)


def turns():
    if arguments.say:
        yield from arguments.say
        return
    while text := input("> "):
        yield text


chat: list[dict[str, str]] = []
for said in turns():
    chat.append({"role": "user", "content": said})
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(rendered, return_tensors="pt", add_special_tokens=False).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = model.generate(**inputs, assistant_model=draft, generation_config=config, streamer=streamer)
    answer = out.sequences[0, inputs["input_ids"].shape[1] :]
    chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    print(f"[{out.stats.emitted} tokens, {out.stats.mean_accepted_length:.1f} drafted tokens accepted a round]")

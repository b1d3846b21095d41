"""A text pipeline with a draft: the config at construction, chats, a batch, and statistics of all of it.

python examples/text_pipeline.py [--model ID --draft ID --device cuda --prompt TEXT]
"""

from pair import load, parser, questions
from transformers import pipeline

from hf_semspec import SemSpecConfig, record_stats

arguments = parser(__doc__).parse_args()
model, draft, tokenizer = load(arguments)

pipe = pipeline(
    "text-generation",
    model=model,
    tokenizer=tokenizer,
    assistant_model=draft,
    generation_config=SemSpecConfig("lossless", num_draft_tokens="auto", max_new_tokens=128, do_sample=False),
)
chats = [[{"role": "user", "content": question}] for question in questions(arguments, 3)]
with record_stats() as stats:
    for (answer,) in pipe(chats, batch_size=len(chats)):
        print(answer["generated_text"][-1]["content"], end="\n\n")
for call in stats:
    print(f"{len(call.rows)} rows: {call.emitted} tokens by {call.target_forwards} target forwards")

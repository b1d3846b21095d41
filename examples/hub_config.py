"""A scheme with its settings as a file, what it was made for beside it, and a recipe that needs neither name.

python examples/hub_config.py                       (into a temporary folder)
python examples/hub_config.py --push me/my-scheme   (to the Hub; log in with `hf auth login` before)
"""

import tempfile

from pair import encode, load, parser, questions

from hf_semspec import SemSpecConfig
from hf_semspec.hub.recipe import export_recipe
from hf_semspec.hub.sidecar import Sidecar

options = parser(__doc__)
options.add_argument("--push", metavar="REPO", help="upload config and sidecar to this repository")
arguments = options.parse_args()
model, draft, tokenizer = load(arguments)
inputs = encode(tokenizer, questions(arguments), model.device)

config = SemSpecConfig("easd", num_draft_tokens=4, penalty=1.0, max_new_tokens=64, do_sample=False)
sidecar = Sidecar(target=arguments.model, draft=arguments.draft)
if arguments.push:
    config.push_to_hub(arguments.push)
    sidecar.push_to_hub(arguments.push)

with tempfile.TemporaryDirectory() as folder:
    # The same by hand: config.save_pretrained(folder), sidecar.save_pretrained(folder).
    export_recipe(folder, config, sidecar)

    made_for = Sidecar.from_pretrained(folder)
    print(f"made for {made_for.target} with {made_for.draft}")
    loaded = SemSpecConfig.from_pretrained(folder, num_draft_tokens=3)
    out = model.generate(**inputs, assistant_model=draft, generation_config=loaded)
    print(tokenizer.decode(out[0], skip_special_tokens=True))

    # What somebody writes who has never heard of this package; hf-semspec must be installed where it runs.
    again = model.generate(**inputs, assistant_model=draft, custom_generate=folder, trust_remote_code=True)
    print("the recipe gives the same text:", out.tolist() == again.tolist())

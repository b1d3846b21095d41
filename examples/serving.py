"""POST /v1/chat/completions, whole or streamed: python examples/serving.py [--model ID --draft ID --device cuda]"""

import json
import threading

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, responses
from pair import encode_chats, load, parser
from transformers import TextIteratorStreamer

from hf_semspec import SemSpecConfig

seeding = threading.Lock()  # every call draws one seed from torch's global generator, and there is only one


class Answer(TextIteratorStreamer):
    def decode(self, asked, model, draft, scheme):
        self.drawn, self.error = not seeding.acquire(), None
        try:
            torch.seed() if asked.get("seed") is None else torch.manual_seed(asked["seed"])
            heat, length = asked.get("temperature") or None, asked.get("max_tokens", 256)
            config = SemSpecConfig(scheme, max_new_tokens=length, do_sample=heat is not None, temperature=heat)
            inputs = encode_chats(self.tokenizer, [asked["messages"]], model.device)
            model.generate(**inputs, assistant_model=draft, generation_config=config, streamer=self)
        except Exception as error:
            self.error = repr(error)
        self.on_finalized_text("")
        self.text_queue.put(self.stop_signal)

    def on_finalized_text(self, text, stream_end=False):
        if not self.drawn:  # the first token, or an error: the next call may start
            self.drawn = seeding.release() is None
        super().on_finalized_text(text)

    def events(self):
        for text in self:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"
        yield f"data: {json.dumps({'error': self.error}) if self.error else '[DONE]'}\n\n"


def create_app(model, draft, tokenizer, scheme="lossless"):
    app = FastAPI()

    @app.post("/v1/chat/completions")
    def complete(asked: dict):
        answer = Answer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        threading.Thread(target=answer.decode, args=(asked, model, draft, scheme)).start()
        if asked.get("stream"):
            return responses.StreamingResponse(answer.events(), media_type="text/event-stream")
        text = "".join(answer)
        if answer.error:
            raise HTTPException(400, answer.error)
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(*load(parser(__doc__).parse_args())), port=8000)

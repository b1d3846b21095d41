"""A small server of the completions protocol over models in process, as vLLM speaks it, and with faults to order."""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

LAWS: dict = {}


class SmallServer:
    """Serves `models` by name on a free port; `faults` are taken from the front, one a request, before it answers."""

    def __init__(self, models, tokenizer, *, port=0, most=20, prompts=True):
        self.models, self.tokenizer, self.most, self.prompts = models, tokenizer, most, prompts
        self.faults, self.asked, self.under_way, self.peak = [], [], 0, 0
        self.lock, self.counts = threading.Lock(), threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                with server.counts:
                    server.under_way += 1
                    server.peak = max(server.peak, server.under_way)
                    fault = server.faults.pop(0) if server.faults else None
                try:
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    server.reply(self, body, fault)
                finally:
                    with server.counts:
                        server.under_way -= 1

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args):
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def reply(self, handler, body, fault):
        status, content = 200, None
        if isinstance(fault, int):
            status, content = fault, {"error": {"message": "to order"}}
        elif fault == "slow":
            time.sleep(0.6)
        elif fault == "drop":
            handler.close_connection = True
            handler.connection.close()
            return
        if content is None:
            self.asked.append(body)
            status, content = self.complete(body)
        data = json.dumps(content).encode()
        if fault == "wrong":
            data = b'{"choices": ['
        elif fault == "other":
            data = b'{"choices": []}'
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if fault == "truncate" else data)
        if fault == "truncate":
            handler.close_connection = True

    @torch.inference_mode()
    def complete(self, body):
        if body["logprobs"] > self.most:
            return 400, {"error": {"message": f"at most {self.most} logprobs"}}
        if body["model"] not in self.models:
            return 404, {"error": {"message": "no such model"}}
        model, ids, eos = self.models[body["model"]], list(body["prompt"]), self.tokenizer.eos_token_id
        if len(ids) + body["max_tokens"] > 512:
            return 400, {"error": {"message": "too long"}}
        draw = torch.Generator().manual_seed(body.get("seed") or 0)
        new, values, tops, reason = [], [], [], "length"
        with self.lock:
            laws = self.laws(model, ids)
            prompt = [None]
            prompt += [
                self.top(law, token, body.get("prompt_logprobs")) for law, token in zip(laws, ids[1:], strict=False)
            ]
            while True:
                law = self.laws(model, [*ids, *new])[-1]
                token = int(law.argmax())
                if body["temperature"]:
                    token = int(torch.multinomial((law / body["temperature"]).softmax(-1), 1, generator=draw))
                new.append(token)
                values.append(float(law[token]))
                tops.append({f"token_id:{i}": e["logprob"] for i, e in self.top(law, token, body["logprobs"]).items()})
                text = self.tokenizer.decode(new)
                if token == eos or any(mark in text for mark in body.get("stop") or ()):
                    reason = "stop"
                    break
                if len(new) == body["max_tokens"]:
                    break
        tokens = [f"token_id:{token}" for token in new]
        found = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        choice = {"index": 0, "text": text, "logprobs": found, "finish_reason": reason}
        if body.get("prompt_logprobs") is not None and self.prompts:
            choice["prompt_logprobs"] = prompt
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        usage["prompt_tokens_details"] = {"cached_tokens": 2}
        return 200, {"choices": [choice], "usage": usage}

    @staticmethod
    def laws(model, ids):
        """(length, V) log-probabilities; kept over tests, which ask the same things."""
        key = id(model), tuple(ids)
        if key not in LAWS:
            LAWS[key] = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return LAWS[key]

    @staticmethod
    def top(law, token, number):
        best = law.topk(min(number or 0, len(law))).indices.tolist()
        return {str(i): {"logprob": max(float(law[i]), -math.inf)} for i in dict.fromkeys([*best, int(token)])}

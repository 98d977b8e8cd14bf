"""A picture server out of the standard library: one patched pipeline, drawn with from many threads.

    python scripts/serve_example.py --port 8000
    curl -d '{"prompt": "a red circle on a blue background", "seed": 1}' \\
        http://127.0.0.1:8000/generate -o circle.png

What it shows holds for FastAPI and Gradio, too. accel needs no lock: any thread may call patched
modules, and their graphs take turns by themselves. What threads must not share is diffusers' and
transformers' own: a scheduler knows one picture at a time, and a fast tokenizer is told how to pad
before it is asked. So every worker has a pipeline of its own around the same modules.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

import accel
from accel.pipelines.demo import load_demo

LONGEST_BODY = 1 << 20


class BadRequest(Exception):
    """What is wrong with a request, in one line."""


class Studio:
    """Draws pictures with one model, in `workers` threads.

    `size` is the height and width of a picture in pixels, `steps` the number of denoising steps:
    fixed, so that every request finds its graphs made.
    """

    def __init__(self, pipe: Any, *, size: int, steps: int, workers: int) -> None:
        self._call = {"height": size, "width": size, "num_inference_steps": steps}
        self._pipe = accel.patch(pipe)
        self._mine = threading.local()
        self._workers = ThreadPoolExecutor(workers, "drawing")

    def warm(self) -> str:
        """Draws until the graphs exist; what was made of them."""
        return str(accel.warm(self._pipe, "warm", **self._call))

    def picture(self, prompt: str, seed: int) -> bytes:
        """A PNG file's bytes. Waits for a worker; any thread may call."""
        return self._workers.submit(self._draw, prompt, seed).result()

    def close(self) -> None:
        """Waits for pictures being drawn and gives the graphs' memory back."""
        self._workers.shutdown()
        accel.unpatch(self._pipe)

    def _draw(self, prompt: str, seed: int) -> bytes:
        if not hasattr(self._mine, "pipe"):
            self._mine.pipe = around_the_same_modules(self._pipe)
        # A generator of its own: the picture does not depend on who else draws.
        generator = torch.Generator().manual_seed(seed)
        image = self._mine.pipe(prompt, generator=generator, **self._call).images[0]
        file = io.BytesIO()
        image.save(file, format="PNG")
        return file.getvalue()


def around_the_same_modules(pipe: Any) -> Any:
    """A pipeline that shares the modules of `pipe`, patched or not, and nothing that a call
    changes: schedulers, tokenizers, the numbers that a pipeline notes of its picture."""
    own = copy.copy(pipe)
    for name, component in pipe.components.items():
        if component is not None and not isinstance(component, nn.Module):
            setattr(own, name, copy.deepcopy(component))
    own.set_progress_bar_config(disable=True)
    return accel.patch(own)  # for its scheduler; the modules are patched already


def asked_for(body: bytes) -> tuple[str, int]:
    """Prompt and seed of a request, `{"prompt": "…", "seed": 1}`. Raises `BadRequest`."""
    try:
        wish = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    prompt, seed = (
        (wish.get("prompt"), wish.get("seed", 0)) if isinstance(wish, dict) else (None, 0)
    )
    if not isinstance(prompt, str):
        raise BadRequest('send {"prompt": "a red circle", "seed": 1}; prompt must be a text')
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise BadRequest(f"seed={seed!r}: must be a whole number from 0 to 2**63 - 1")
    return prompt, seed


def server(studio: Studio, host: str, port: int) -> ThreadingHTTPServer:
    """A server on which `serve_forever` is to be called; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.path != "/generate":
                self._answer(404, "text/plain", b"POST /generate\n")
            elif length > LONGEST_BODY:
                self._answer(413, "text/plain", b"the request is too long\n")
            else:
                self._generate(self.rfile.read(length))

        def _generate(self, body: bytes) -> None:
            try:
                picture = studio.picture(*asked_for(body))
            except BadRequest as error:
                self._answer(400, "text/plain", f"{error}\n".encode())
            else:
                self._answer(200, "image/png", picture)

        def _answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return ThreadingHTTPServer((host, port), Handler)


def load(model: str) -> Any:
    """The built-in demo model or a folder or hub id, on the GPU if there is one."""
    if model == "demo":
        pipe = load_demo()
    else:
        pipe = DiffusionPipeline.from_pretrained(model, dtype=torch.bfloat16)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Serves until Ctrl-C."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", default="demo", help="a folder, a hub id, or demo")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options.add_argument("--size", type=int, default=64, help="height and width in pixels")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--workers", type=int, default=2, help="pictures drawn at the same time")
    given = options.parse_args()
    studio = Studio(load(given.model), size=given.size, steps=given.steps, workers=given.workers)
    with server(studio, given.host, given.port) as serving:
        print(studio.warm())
        host, port = serving.server_address[:2]
        print(f"POST http://{host!s}:{port}/generate", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            studio.close()


if __name__ == "__main__":
    main()

"""The example server draws what eager draws, for several who ask at once, and stops when told."""

from __future__ import annotations

import functools
import io
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from accel.pipelines import tiny
from accel.pipelines.demo import load_demo

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import serve_example


def ask(port: int, wish: Any, path: str = "/generate") -> tuple[int, bytes]:
    body = wish if isinstance(wish, bytes) else json.dumps(wish).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


class TestScript:
    """As a person starts it: the demo model on the CPU."""

    @pytest.fixture
    def port(self) -> Iterator[int]:
        command = [sys.executable, serve_example.__file__, "--port", "0", "--steps", "2"]
        # Tests that a script starts in the background inherit that Ctrl-C is ignored.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
        assert running.stdout is not None
        line = next(line for line in running.stdout if line.startswith("POST http"))
        yield int(line.rsplit(":", 1)[1].split("/")[0])
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0

    def test_two_pictures_at_once_and_what_is_wrong_in_a_line(self, port: int) -> None:
        pipe, prompt = load_demo(), "a red circle on a blue background"
        wishes = [{"prompt": prompt, "seed": seed} for seed in (1, 2)]
        with ThreadPoolExecutor(2) as people:
            answers = list(people.map(lambda wish: ask(port, wish), wishes))
        for (status, png), wish in zip(answers, wishes, strict=True):
            generator = torch.Generator().manual_seed(int(str(wish["seed"])))
            call = {"height": 64, "width": 64, "num_inference_steps": 2}
            right = pipe(prompt, generator=generator, **call).images[0]
            assert status == 200
            assert np.array_equal(pixels(png), np.asarray(right))
        for wish, complaint in [
            (b"{", "no JSON"),
            ({}, "prompt must be a text"),
            ({"prompt": "a cat", "seed": "x"}, "seed='x'"),
        ]:
            status, text = ask(port, wish)
            assert (status, text.count(b"\n")) == (400, 1)
            assert complaint in text.decode()
        assert ask(port, {}, "/")[0] == 404


def test_workers_replay_the_same_graphs(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    always = functools.partial(accel.patch, capture="always")
    monkeypatch.setattr(serve_example.accel, "patch", always)
    plain = tiny.pipeline("sd15")
    plain.set_progress_bar_config(disable=True)
    call = {"height": 16, "width": 16, "num_inference_steps": 2}
    right = [
        np.asarray(plain("a cat", generator=torch.Generator().manual_seed(s), **call).images[0])
        for s in range(8)
    ]
    studio = serve_example.Studio(tiny.pipeline("sd15").to(sim), size=16, steps=2, workers=4)
    studio.warm()
    before = accel.report(studio._pipe)["unet"].replays
    with ThreadPoolExecutor(4) as people:
        drawn = list(people.map(lambda seed: studio.picture("a cat", seed), range(8)))
    assert [np.array_equal(pixels(p), r) for p, r in zip(drawn, right, strict=True)] == [True] * 8
    report = accel.report(studio._pipe)["unet"]
    assert (report.captures, report.replays - before) == (1, 16)
    studio.close()
    assert not any(thread.name.startswith("drawing") for thread in threading.enumerate())

"""A training step as one CUDA graph.

A step of these small models is some thousand short kernels: launched one by one they keep the host
busy and the GPU waiting. A step that reads its inputs from fixed buffers can be captured once and
replayed with a single launch. This module knows graphs and streams, not what a step does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[], None]
TRIALS = 4
"""Steps before the capture: the optimizer's state and the libraries' choices are made in them."""


def recorded(step: Step, device: torch.device, log: Callable[[str], None]) -> Step:
    """`step` as a replayed CUDA graph; `step` itself on a CPU, or with a log line if capturing
    fails.

    `step` reads and writes fixed tensors, draws no random numbers and never asks the device for a
    value. On CUDA it is called `TRIALS` times here, so its learning rate should stand at zero.
    """
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(TRIALS):
            step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            step()
    except RuntimeError as error:
        log(f"no CUDA graph, training step by step: {str(error).splitlines()[0]}")
        torch.cuda.synchronize(device)
        return step
    log("the training step is one CUDA graph")
    return graph.replay

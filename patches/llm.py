"""A transformers causal LM behind `accel.prefill`: `prefill_runner` makes the runner.

Knows how transformers models are put together (a decoder, a head, configs, caches, rotary modules,
experts), not any family: whatever a model does that packing cannot honour is found by the hook, the
self-test, or both.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel.graph import as_break
from accel.patches.attention import OfThisThread, attending, implementation
from accel.patches.gated import fused_gates
from accel.patches.kernels import kernels_for
from accel.patches.norms import fused_norms
from accel.patches.rotary import fused_rotary
from accel.patches.state import StateProbe
from accel.prefill.attention import AttentionGroup
from accel.prefill.model import Attend
from accel.prefill.runner import PrefillRunner

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
"""One lock per decoder: two runners of one model must not set its attention at the same time."""
_rerouted = threading.local()


def prefill_runner(
    model: nn.Module,
    *,
    max_tokens: int = 8192,
    max_requests: int = 16,
    cache_tokens: int = 0,
    mode: str = "breakable",
    attention: str = "auto",
    buckets: Sequence[int] | None = None,
    fused: bool = True,
) -> PrefillRunner:
    """A runner that prefills prompts of a transformers causal LM by graphs.

    `model` is the LM, on its device, as loaded; it is not changed. `max_tokens` is the largest
    batch in tokens, and the chunk size of longer prompts; `max_requests` the most prompts per batch
    in `mode="full"`; `cache_tokens` how many tokens' keys and values can be kept, for prefixes,
    chunks and `generate` (0: none). `mode` is "breakable", "full" or "eager"; `attention` "auto",
    "flashinfer", "torch" or "reference"; `buckets` the sizes to pad batches to; without `fused`
    norms, rotary embeddings and gated units run op by op as in the model's file. Raises
    ValueError for arguments that cannot be met. A model that cannot be packed runs as it is, prompt
    by prompt: `runner.report.declined` says why. Of a model split by `tp_plan`, every rank makes a
    runner and calls it with the same prompts.

    >>> runner = accel.prefill_runner(model)                             # doctest: +SKIP
    >>> runner([[1, 15043, 3186], [1, 3924]]).logits.shape               # doctest: +SKIP
    torch.Size([2, 32000])
    """
    return PrefillRunner(
        TransformersModel(model, fused=fused),
        max_tokens=max_tokens,
        max_requests=max_requests,
        cache_tokens=cache_tokens,
        mode=mode,
        attention=attention,
        buckets=buckets,
    )


class TransformersModel:
    """`accel.prefill.model.PrefillModel` of a transformers model."""

    def __init__(self, model: Any, *, fused: bool = True) -> None:
        if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
            raise ValueError(f"{type(model).__name__} is no transformers causal LM")
        self._model, self._decoder = model, _decoder_of(model)
        config = self._decoder.config
        table = self._decoder.get_input_embeddings()
        self.module, self.depth = model, getattr(config, "num_hidden_layers", 1)
        self.name = type(model).__name__
        # Weights that accelerate keeps elsewhere are nowhere between calls.
        offloaded = getattr(getattr(table, "_hf_hook", None), "execution_device", None)
        self.device = torch.device(table.weight.device if offloaded is None else offloaded)
        self.dtype = self._decoder.dtype
        self.hidden_size = config.hidden_size
        self._rotary = [m for m in self._decoder.modules() if hasattr(m, "rope_type")]
        self.position_limit = _position_limit(config, self._rotary)
        self.horizon = _horizon(config)
        self.routes = _has_experts(config)
        self.stages: Sequence[nn.Module] = _stages_of(self._decoder)
        self._probe, self._fused = StateProbe(model), fused
        if fused:
            kernels_for(self.device)  # compiled now: later something may be recorded
        self._lock = _locks.setdefault(self._decoder, threading.RLock())
        self._capped = False
        self._output_class: Any = None
        self.ranks = getattr(model, "tp_size", None) or 1
        several = self.ranks > 1
        self._group: Any = torch.distributed.new_group(backend="gloo") if several else None

    @property
    def vocab_size(self) -> int:
        """As `PrefillModel.vocab_size`."""
        return int(self._decoder.get_input_embeddings().weight.shape[0])

    def objection(self) -> str | None:
        """As `PrefillModel.objection`."""
        if any("dynamic" in kind for kind in _rope_types(self._rotary)):
            return "dynamic RoPE: its frequencies follow the longest prompt that was ever seen"
        config = self._decoder.config
        if hasattr(config, "floor_scale") and getattr(config, "attn_temperature_tuning", False):
            return "attention is scaled by a token's row in the batch (attn_temperature_tuning)"
        dropouts = (m for m in self._decoder.modules() if isinstance(m, nn.Dropout))
        if any(m.training and m.p > 0 for m in dropouts):
            return "the model drops out at random: call model.eval()"
        self._refuse_more_than_a_head()
        return self._probe.veto()

    @torch.no_grad()
    def _refuse_more_than_a_head(self) -> None:
        """A model may do more than its decoder and its head do (a prompt tuning puts tokens in
        front): neither a packed pass nor the decoder alone would be right."""
        if self._decoder is self._model:
            return
        ids = torch.arange(1, 4, device=self.device) % self.vocab_size
        try:
            own, again, mine = self._logits(ids), self._logits(ids), self.head(self.own(ids))
            noise = _error(again, own)  # some sum in another order every time
            differs = mine.shape != own.shape or _error(mine, own) > max(
                8 * torch.finfo(own.dtype).eps, 4 * noise
            )
        except Exception:  # whatever it is that a model needs more, it comes up again
            return
        if differs:
            raise ValueError(
                f"{self.name} computes other logits than its decoder and head: prefill would leave "
                "out what it adds"
            )

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        with self._lock:
            named = self._model(input_ids=ids[None], use_cache=False, **self._with_names())
        logits: torch.Tensor = named.logits[0]
        return logits

    def body(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As `PrefillModel.body`."""

        def noting(group: AttentionGroup, *tensors: Any) -> torch.Tensor:
            self._capped |= group.softcap is not None
            return attend(group, *tensors)

        with self._lock, self._fewer_kernels(), attending(self._decoder, noting):
            return self._hidden(input_ids=ids, position_ids=positions)

    def masked_body(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """As `PrefillModel.masked_body`: a 4-D mask is taken as it is."""
        sdpa = implementation(self._decoder, OfThisThread("sdpa"))
        with self._lock, self._fewer_kernels(), sdpa:
            return self._hidden(input_ids=ids, position_ids=positions, attention_mask=mask)

    @contextlib.contextmanager
    def _fewer_kernels(self) -> Iterator[None]:
        """Rounds elsewhere than the model does. That may send a token to other experts, so where
        there are any only norms are fused, which gain most."""
        with contextlib.ExitStack() as stack:
            if self._fused:
                stack.enter_context(fused_norms(self._decoder))
            if self._fused and not self.routes:
                stack.enter_context(fused_rotary(self._decoder))
                stack.enter_context(fused_gates(self._decoder, self.device))
            yield

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """As `PrefillModel.own`. Before transformers 5.24 `sdpa` leaves a soft-cap out without a
        word; then the attention written out in the model's file is its own."""
        config = self._decoder.config
        silent = self._capped and config._attn_implementation == "sdpa"
        name = OfThisThread("eager")
        written_out = implementation(self._decoder, name) if silent else contextlib.nullcontext()
        with self._lock, written_out:
            return self._hidden(input_ids=ids[None])[0]

    def _hidden(self, **inputs: torch.Tensor) -> torch.Tensor:
        output = self._decoder(**inputs, use_cache=False, **self._with_names())
        self._output_class = type(output)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _with_names(self) -> dict[str, Any]:
        """Makes the model name its outputs, also where its configuration asks for tuples."""
        return {} if getattr(self._model.config, "return_dict", True) else {"return_dict": True}

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `PrefillModel.head`: the model's own forward around a decoder that returns `hidden`.
        A model without a head returns what it got."""
        if self._decoder is self._model:
            return hidden
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
        output = self._output_class(last_hidden_state=hidden[None])
        with self._lock, _returning(self._decoder, output):
            named = self._model(input_ids=ids, use_cache=False, **self._with_names())
            logits: torch.Tensor = named.logits
        if logits.shape[:2] != ids.shape:
            made = f"logits {tuple(logits.shape)} of {len(hidden)} tokens"
            raise ValueError(f"{self.name} is no causal LM: its head makes {made}")
        return logits[0]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """As `PrefillModel.capturing`: experts that wait for the device, and rotary modules that
        read the longest position, are breaks meanwhile."""
        waiting = [m for m in self._decoder.modules() if _waits(m, self.device, self.dtype)]
        with self._lock, contextlib.ExitStack() as stack:
            for module in waiting:
                forward = as_break(module.forward, pure=True, kind="module")
                stack.enter_context(_forward_of(module, forward))
            yield

    def state(self) -> Any:
        """As `PrefillModel.state`: hooks, adapters and their scales, plain attributes."""
        with self._lock:  # what another runner of this model sets for one call is none of it
            return self._probe()

    def agree(self, fine: bool) -> bool:
        """As `PrefillModel.agree`, over a group of its own that needs no device."""
        if self._group is None:
            return fine
        verdict = torch.tensor(int(fine), device="cpu")
        torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, self._group)
        return bool(verdict.item())

    def generate_kwargs(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        keys_values: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    ) -> dict[str, Any]:
        """As `PrefillModel.generate_kwargs`: prompts are padded on the left, as there."""
        from transformers import DynamicCache

        if not 0 <= min(first_tokens) <= max(first_tokens) < self.vocab_size:
            raise ValueError(f"first tokens {[*first_tokens]}: ids go to {self.vocab_size - 1}")
        longest = max(map(len, prompts))
        whole = [[*p, first] for p, first in zip(prompts, first_tokens, strict=True)]
        ids = [[0] * (longest + 1 - len(p)) + p for p in whole]
        mask = [[0] * (longest + 1 - len(p)) + [1] * len(p) for p in whole]
        cache = DynamicCache(config=self._decoder.config)
        for layer, of_prompts in enumerate(zip(*keys_values, strict=True)):
            keys, values = (
                torch.stack([_padded(pair[which], longest) for pair in of_prompts])
                for which in (0, 1)
            )
            cache.update(keys, values, layer)
        name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else None
        return {
            "input_ids": torch.tensor(ids, device=self.device),
            "attention_mask": torch.tensor(mask, device=self.device),
            name or "past_key_values": cache,
        }


def _decoder_of(model: Any) -> Any:
    """The part between token ids and hidden states; the model itself if it has no head."""
    decoder, embeddings = model.get_decoder(), model.get_input_embeddings()
    is_part = decoder is not model or model.get_output_embeddings() is None
    if is_part and embeddings in decoder.modules():  # else it may be a head of that name
        return decoder
    return next((m for m in model.children() if embeddings in [*m.modules()][1:]), model)


def _stages_of(module: nn.Module) -> list[nn.Module]:
    """The outermost lists of modules: a decoder's layers, among them."""
    found: list[nn.Module] = []
    for child in module.children():
        found += child if isinstance(child, nn.ModuleList) else _stages_of(child)
    return found


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found.float() - wanted.float()).norm()
    return float(difference / wanted.float().norm().clamp(min=1e-30))


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    """`[tokens, heads, dim]` as `[heads, length, dim]`, zeros in front."""
    padding = (0, 0, length - states.shape[0], 0)
    return nn.functional.pad(states.transpose(0, 1), padding)


def _rope_types(rotary: Sequence[Any]) -> set[str]:
    kinds: set[str] = set()
    for module in rotary:
        named = module.rope_type
        kinds |= set(named.values()) if isinstance(named, dict) else {named}
    return kinds


def _position_limit(config: Any, rotary: Sequence[Any]) -> int | None:
    """Where packing ends: with a table of positions, the table; with `longrope`, the length from
    which on a whole batch gets other frequencies."""
    if not rotary:
        return getattr(config, "max_position_embeddings", None)
    if "longrope" not in _rope_types(rotary):
        return None
    found = _values(getattr(config, "rope_parameters", None), "original_max_position_embeddings")
    found += [x for x in [getattr(config, "original_max_position_embeddings", None)] if x]
    return min(found, default=config.max_position_embeddings)


def _values(tree: Any, name: str) -> list[int]:
    """Every value under `name` in nested dicts."""
    if not isinstance(tree, dict):
        return []
    mine = [tree[name]] if tree.get(name) else []
    return mine + [x for child in tree.values() for x in _values(child, name)]


def _horizon(config: Any) -> int:
    """The longest window, chunk or selection of keys that the config names."""
    words = "window", "chunk", "topk"
    named = (x for key, x in vars(config).items() if any(word in key for word in words))
    return max((x for x in named if isinstance(x, int) and not isinstance(x, bool)), default=0)


def _has_experts(config: Any) -> bool:
    """Whether the config counts more than one of them, under whatever name."""
    counts = (x for key, x in vars(config).items() if "expert" in key)
    return any(x > 1 for x in counts if isinstance(x, int))


def _waits(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the host waits for the device in a module's forward, so that it cannot be recorded.

    Grouped matrix products read their offsets on the device from sm90 on, in bf16.
    """
    if "longrope" in _rope_types([module] if hasattr(module, "rope_type") else []):
        return not _longrope_stays_on_device()
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_bias"):
        return False  # not what transformers' decorator for experts makes
    kind = getattr(module.config, "_experts_implementation", None)
    if kind == "grouped_mm":
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return not (hopper and dtype == torch.bfloat16)
    return kind != "batched_mm"


def _longrope_stays_on_device() -> bool:
    """From transformers 5.24 on."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


@contextlib.contextmanager
def _forward_of(module: nn.Module, forward: Any) -> Iterator[None]:
    """While open, `module` has this forward of its own; what it had comes back after."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextlib.contextmanager
def _returning(decoder: nn.Module, output: Any) -> Iterator[None]:
    """While open, `decoder` in this thread computes nothing and returns `output`."""
    original, _rerouted.output = decoder.forward, output

    def forward(*args: Any, **kwargs: Any) -> Any:
        mine = getattr(_rerouted, "output", None)
        return original(*args, **kwargs) if mine is None else mine

    try:
        with _forward_of(decoder, forward):
            yield
    finally:
        _rerouted.output = None

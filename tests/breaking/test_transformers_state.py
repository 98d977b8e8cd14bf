"""What broke once or still does: configurations and key/value caches."""

from __future__ import annotations

import torch
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaForCausalLM

import accel


def clip():
    torch.manual_seed(0)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    ).eval()


def llama(kind=LlamaForCausalLM):
    torch.manual_seed(0)
    return kind(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).eval()


def twins(make, sim):
    p, q = make().to(sim), make().to(sim)
    return p, accel.patch(q, capture="always")


def ids(sim, n=6, seed=0):
    return torch.randint(3, 50, (1, n), generator=torch.Generator().manual_seed(seed)).to(sim)


def test_config_asks_for_hidden_states(sim):
    p, q = twins(clip, sim)
    with torch.no_grad():
        for i in range(4):
            assert torch.equal(p(ids(sim, seed=i))[0], q(ids(sim, seed=i))[0])
        assert accel.report(q).parts[0].replays > 0
        for m in (p, q):
            m.config.output_hidden_states = True
        a, b = p(ids(sim)), q(ids(sim))
        assert list(a) == list(b)


def test_another_attention_implementation(sim):
    p, q = twins(clip, sim)
    with torch.no_grad():
        for i in range(4):
            p(ids(sim, seed=i)), q(ids(sim, seed=i))
        assert accel.report(q).parts[0].replays > 0
        from transformers import AttentionInterface

        def halved(module, query, key, value, mask, **kw):
            return (value.transpose(1, 2) * 0.5).contiguous(), None

        AttentionInterface.register("breaker", halved)
        for m in (p, q):
            m.config._attn_implementation = "breaker"  # what set_attn_implementation does
        a, b = p(ids(sim)), q(ids(sim))
        assert (
            not torch.equal(a[0], q.original if 0 else p.embeddings.token_embedding.weight[:1])
            or True
        )
        assert torch.equal(a[0], b[0])


def test_a_language_model_keeps_its_cache(sim):
    "accel.patch(llm): a decoding loop by hand, use_cache left to the configuration"
    p, q = twins(llama, sim)
    with torch.no_grad():
        a, b = p(ids(sim)), q(ids(sim))
        assert a.past_key_values is not None
        assert b.past_key_values is not None


def test_decoding_by_hand(sim):
    p, q = twins(llama, sim)

    def decode(m):
        x, past, out = ids(sim), None, []
        with torch.no_grad():
            for _ in range(6):
                r = m(x, past_key_values=past)
                past = r.past_key_values
                out.append(r.logits[:, -1].cpu())
                x = r.logits[:, -1:].argmax(-1)
        return torch.stack(out)

    assert torch.equal(decode(p), decode(q))


def test_on_the_cpu_nothing_changes(monkeypatch, sim):
    q = accel.patch(llama().to(sim))
    q.to("cpu")
    with torch.no_grad():
        assert q(ids("cpu")).past_key_values is not None


def test_config_use_cache_set_by_a_user(sim):
    q = accel.patch(llama().to(sim), capture="always")
    q.config.use_cache = True
    with torch.no_grad():
        assert q(ids(sim)).past_key_values is not None

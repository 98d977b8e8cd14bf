"""LLM prefill on breakable graphs: prompts in, last-token logits and hidden states out.

This package knows torch and the engine. It knows no transformers: a model comes in behind the small
protocol of `model.py`, attention behind that of `attention.py`.

How a call runs. Prompts are packed, one behind the other, into `[1, bucket]` ids and positions
(`batch.py`), the bucket being the next of a ladder of sizes (`buckets.py`), the tail zeros. The
runner (`runner.py`) plans the attention for this batch, on the host, outside of any graph; then the
model's body runs, or the graph that was captured of it. Every layer's attention comes to the runner
as q, k, v of `bucket` rows:

* breakable: a break between two segments, so it sees this batch's live metadata;
* full: part of the one graph. Per-request metadata lies in `max_requests` slots whose addresses
  were captured; slots that no request takes are sentinels of length zero (`slots.py`). Numbers that
  a kernel takes from the host are captured as upper bounds;
* eager: the breakable mode's functions without a graph around them: the fallback, and what to try
  first when something looks wrong.

In all three the runner writes keys and values of the real rows into the cache (`kv_cache.py`) if
there is one, and clears the rows of `out` behind the last real token.

What callers see (`runner.py`, `result.py`, `report.py`); `accel.prefill_runner` makes the first:

    runner(prompts, prefix=None)  -> Result; prompts are lists of token ids, `prefix` a Handle or a
                                     list with a Handle or None per prompt
    runner.score(prompts)         -> one float32 tensor per prompt, on the host: entry t is the
                                     log-probability of token t + 1 given those up to t
    runner.capture(progress=True) captures every bucket now, the largest first; `progress` may also
                                     be a function (done, total, bucket)
    runner.plan()                 -> MemoryPlan: what capturing to the ceiling will take, in bytes
    runner.report                 -> PrefillReport: mode, attention, declined, captures, replays,
                                     eager calls, reasons, bytes per bucket
    runner.close()                gives memory back; calls afterwards raise
    result.logits                 `[requests, vocab]`, on the device, after the last tokens
    result.hidden(i)              `[tokens, hidden]`, on the device
    result.handle(i)              keeps prompt i's keys and values cached (needs cache_tokens=);
                                  what nobody asked for gives way to later calls
    result.generate_kwargs(first) for `model.generate(**...)`, after the tokens `first`

Bad arguments raise ValueError with one line. A model that cannot be packed is no error: its prompts
run through its own forward, one by one, and `runner.report.declined` says why.
"""

"""How small an update of a policy is: a real bf16 model, trained with AdamW, published as deltas, and put together again.

    python -m tests.benchmarks.weights_delta          (under 90 s on one core)

The model: a Qwen2 of 61 million parameters (hidden 640, 10 layers, 10 heads, MLP 1792, tied embeddings of 16,384 tokens), made
here with the library's own random initialisation, since nothing is downloaded. The data: Python's language reference, as the
interpreter carries it, in tokens of a BPE trained on it. Training: float32 master weights, AdamW (lr 1e-6, no weight decay,
clipped gradients), 10 steps on 2 x 256 tokens each, the bf16 rounding published after every step.

    delta_ratio           bytes that a producer of the version before has to fetch / bytes of the policy: deltas, tensors
                          without one, and the manifest, the mean of the 10 updates. At most 0.03
    delta_bit_identical   the deltas applied one after the other to the first version give every later one, bit by bit
    changed_share         words that changed in an update, the mean
    encode_mb_per_s       bytes of tensors / CPU seconds of making their deltas (comparing, packing, both digests)
    apply_mb_per_s        the same for applying them (and the digest of the result)

AdamW moves every weight by about lr in these first steps, more than later on when gradients disagree: updates of a long run
are smaller. A published policy that is trained for long has the same spread of magnitudes as this one's, and it is that which
decides how many bf16 values a step of 1e-6 reaches.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

from echo.weights import manifest as manifests
from echo.weights.chunks import ChunkFiles, StoredTensor
from echo.weights.delta import encode_delta, patch
from echo.weights.manifest import Chunk, HostTensor, Manifest
from echo.weights.store import Published, WeightStore

STEPS = 10
LR = 1e-6
ROWS, ROW_TOKENS = 2, 256
VOCABULARY = 16_384
CHUNK_BYTES = 8 * 2**20
TARGET = 0.03


def corpus() -> torch.Tensor:
    """The ids of a real text, about 100,000."""
    text = [topics[name] for name in sorted(topics)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return torch.tensor(tokenizer.encode("\n".join(text)).ids)


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=10,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen2ForCausalLM(config).float()


def policy(model: torch.nn.Module) -> list[HostTensor]:
    """What is published: the bf16 rounding of every tensor, tied ones once."""
    tensors = []
    for name, value in model.named_parameters():
        rounded = value.detach().bfloat16().contiguous().view(torch.int16).numpy()
        tensors.append(HostTensor(name, "BF16", tuple(value.shape), rounded.data.cast("B")))
    return tensors


def updates(model: Qwen2ForCausalLM) -> Iterator[list[HostTensor]]:
    """The policy after each of the steps."""
    ids = corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    # Rows from all over the text.
    starts = torch.linspace(0, len(ids) - ROW_TOKENS, STEPS * ROWS).long()
    for step in range(STEPS):
        rows = torch.stack([ids[start : start + ROW_TOKENS] for start in starts[step::STEPS].tolist()])
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield policy(model)


def fetched_bytes(published: Published, before: Manifest) -> int:
    """What a producer fetches that holds the version before: manifest, deltas, and the chunks of what has no delta."""
    old = {entry.name: entry.digest for entry in before.tensors}
    had = set(before.chunks())
    lacked: set[Chunk] = set()
    fetched = published.path.stat().st_size
    for entry in published.manifest.tensors:
        if entry.delta is not None:
            fetched += entry.delta.nbytes
        elif old.get(entry.name) != entry.digest:
            lacked |= set(entry.chunks) - had
    return fetched + sum(chunk.nbytes for chunk in lacked)


def delta_figures() -> dict[str, Any]:
    """The figures of this file's docstring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(WeightStore(Path(folder)))
    finally:
        torch.set_num_threads(threads)


def _measure(store: WeightStore) -> dict[str, Any]:
    model = make_model()
    tensors = policy(model)
    held = {one.name: bytearray(one.data) for one in tensors}
    before = _publish(store, 0, tensors).manifest
    files = ChunkFiles(store.root)
    ratios, shares = [], []
    encode_s = apply_s = 0.0
    patched_bytes = encoded_bytes = 0
    identical = True
    for version, tensors in enumerate(updates(model), 1):
        changed = sum(
            np.count_nonzero(np.frombuffer(held[one.name], np.uint16) != np.frombuffer(one.data, np.uint16)) for one in tensors
        )
        shares.append(changed * 2 / before.nbytes)
        # The largest tensor's speed, by itself: publishing also waits for the disk.
        largest = max(tensors, key=lambda one: one.data.nbytes)
        began = time.process_time()
        encode_delta(held[largest.name], largest.data, 2)
        encode_s += time.process_time() - began
        encoded_bytes += largest.data.nbytes
        published = _publish(store, version, tensors)
        ratios.append(fetched_bytes(published, before) / published.manifest.nbytes)
        for entry in published.manifest.tensors:
            if entry.delta is not None:
                delta = StoredTensor(files, entry.delta).read(0, entry.delta.nbytes)
                began = time.process_time()
                patch(memoryview(held[entry.name]), delta, where=entry.name)
                apply_s += time.process_time() - began
                patched_bytes += entry.nbytes
            elif manifests.digest(memoryview(held[entry.name])) != entry.digest:
                held[entry.name] = StoredTensor(files, entry).read(0, entry.nbytes)
        identical &= all(held[one.name] == one.data for one in tensors)
        before = published.manifest
    return {
        "delta_ratio": round(statistics.mean(ratios), 5),
        "delta_bit_identical": bool(identical),
        "delta_model_parameters": before.nbytes // 2,
        "delta_ratio_first": round(ratios[0], 5),
        "delta_ratio_last": round(ratios[-1], 5),
        "changed_share": round(statistics.mean(shares), 5),
        "encode_mb_per_s": round(encoded_bytes / encode_s / 1e6),
        "apply_mb_per_s": round(patched_bytes / apply_s / 1e6),
    }


def _publish(store: WeightStore, version: int, tensors: list[HostTensor]) -> Published:
    return store.publish(
        "benchmark", version, version, tensors, chunk_bytes=CHUNK_BYTES, keep=2, created=time.time(), delta_chain=1
    )


if __name__ == "__main__":
    print(json.dumps(delta_figures(), indent=2))

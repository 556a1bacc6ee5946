"""vLLM's KV-cache manager on the workload of ledger_speed.py; run by an interpreter that has vLLM, prints JSON.

python peer_vllm_ledger.py NUM_REQUESTS SEED
"""

import json
import random
import sys
import time

TOKENS, BLOCK_TOKENS, VOCAB, APPENDED = 4096, 16, 49152, 16


def cycle(num_requests: int, seed: int) -> dict[str, float]:
    """Seconds a request; append_token: a token."""
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    digest = get_hash_fn_by_name("sha256")
    init_none_hash(digest)
    hasher = get_request_block_hasher(BLOCK_TOKENS, digest)
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    group = KVCacheGroupSpec(["layer"], spec)
    draw = random.Random(seed)
    shared = [draw.randrange(VOCAB) for _ in range(TOKENS // 2)]
    texts = [shared + [draw.randrange(VOCAB) for _ in range(TOKENS // 2)] for _ in range(num_requests)]
    params = SamplingParams(max_tokens=64)
    num_blocks = num_requests * TOKENS // BLOCK_TOKENS + 1024
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    manager = KVCacheManager(
        config, max_model_len=8192, scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS, enable_caching=True
    )
    clock, spent = time.perf_counter, {"lookup": 0.0, "grant": 0.0}
    requests = []
    for number, text in enumerate(texts):
        begin = clock()
        request = Request(f"r{number}", text, params, None, block_hasher=hasher)  # its blocks are hashed here
        blocks, num_hit, *_ = manager.get_computed_blocks(request)
        looked_up = clock()
        granted = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks)
        spent["grant"] += clock() - looked_up
        spent["lookup"] += looked_up - begin
        assert granted is not None and num_hit == (TOKENS // 2 if number else 0)
        requests.append(request)
    begin = clock()
    for _ in range(APPENDED):
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(7)
            manager.allocate_slots(request, 1)
    appended = clock() - begin
    begin = clock()
    for request in requests:
        manager.free(request)
    spent["release"] = clock() - begin
    return {name: time_s / num_requests for name, time_s in spent.items()} | {
        "append_token": appended / num_requests / APPENDED
    }


if __name__ == "__main__":
    cycle(int(sys.argv[1]), 0)  # warms up
    print(json.dumps(cycle(int(sys.argv[1]), int(sys.argv[2]))))

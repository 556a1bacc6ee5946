// The page's whole arithmetic: joins numbers that the planner counted. Knows nothing of the page; tests run it on every
// grid point and hold it against the planner.
"use strict";

const formulas = {
  // Bytes for caches on one device: what its weights leave of the usable memory.
  cacheMemory(device, share) {
    return Math.max(0, device.usable_bytes - share.weights_bytes);
  },

  // Sequences of so many bytes that fit: none where the weights do not; null: an empty cache bounds nothing.
  usersThatFit(device, share, bytesEach) {
    if (share.weights_bytes > device.usable_bytes) return 0;
    return bytesEach > 0 ? Math.floor(formulas.cacheMemory(device, share) / bytesEach) : null;
  },

  // One decode step of grid.users[u] sequences of grid.contexts[c] tokens, on the roofline; null without a bandwidth.
  step(grid, share, cache, device, c, u) {
    if (!device.bandwidth_bytes_per_s) return null;
    const users = grid.users[u];
    const weights = share.weights_read[u];
    const caches = users * cache.read_bytes[c];
    const memory = (weights + caches) / device.bandwidth_bytes_per_s;
    const compute = device.bf16_flops ? (users * share.decode_flops[c]) / device.bf16_flops : 0;
    const seconds = Math.max(memory, compute);
    return {
      seconds,
      perUser: 1 / seconds,
      total: users / seconds,
      limit: memory >= compute ? "memory" : "compute",
      weightsSeconds: weights / device.bandwidth_bytes_per_s,
      cacheSeconds: caches / device.bandwidth_bytes_per_s,
      computeSeconds: compute,
    };
  },

  // Seconds until a prompt of the c-th context has its first token; null where a rate is not known.
  firstToken(share, device, c) {
    if (!device.bandwidth_bytes_per_s || !device.bf16_flops) return null;
    return Math.max(share.prefill_flops[c] / device.bf16_flops, share.prefill_read[c] / device.bandwidth_bytes_per_s);
  },
};

if (typeof module !== "undefined") module.exports = formulas;

// The page's whole arithmetic: joins numbers that the planner counted. Knows nothing of the page; tests run it on every
// grid point and hold it against the planner.
"use strict";

const formulas = {
  // Bytes for caches on one device: what its weights leave of the usable memory.
  cacheMemory(device, share) {
    return Math.max(0, device.usable_bytes - share.weights_bytes);
  },

  // Sequences of so many bytes that fit; null: an empty cache bounds nothing.
  usersThatFit(memory, bytesEach) {
    return bytesEach > 0 ? Math.floor(memory / bytesEach) : null;
  },

  // One decode step of grid.users[u] sequences of grid.contexts[c] tokens, on the roofline; null without a bandwidth.
  step(grid, share, cache, device, c, u) {
    if (!device.bandwidth_bytes_per_s) return null;
    const together = Math.ceil(grid.users[u] / grid.pipeline);
    const weights = share.weights_read[u];
    const caches = together * cache.read_bytes[c];
    const memory = (weights + caches) / device.bandwidth_bytes_per_s;
    const compute = device.bf16_flops ? (together * share.decode_flops[c]) / device.bf16_flops : 0;
    const seconds = Math.max(memory, compute) * grid.pipeline;
    return {
      seconds,
      perUser: 1 / seconds,
      total: grid.users[u] / seconds,
      limit: memory >= compute ? "memory" : "compute",
      weightsSeconds: (weights / device.bandwidth_bytes_per_s) * grid.pipeline,
      cacheSeconds: (caches / device.bandwidth_bytes_per_s) * grid.pipeline,
      computeSeconds: compute * grid.pipeline,
    };
  },

  // Seconds until a prompt of grid.contexts[c] tokens has its first token; null where a rate is not known.
  firstToken(grid, share, device, c) {
    if (!device.bandwidth_bytes_per_s || !device.bf16_flops) return null;
    const compute = share.prefill_flops[c] / device.bf16_flops;
    return Math.max(compute, share.weights_bytes / device.bandwidth_bytes_per_s) * grid.pipeline;
  },
};

if (typeof module !== "undefined") module.exports = formulas;

// What the kernels are told: shapes, formats and where bytes lie. Plain data, raw pointers, no torch, no Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvfolio {

enum Format : int { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3 };

inline int value_bytes(int format) { return format == F32 ? 4 : format == INT8 ? 1 : 2; }
inline int scale_bytes(int format) { return format == INT8 ? 4 : 0; }

// Where a block may lie during a step.
enum Source : int {
  SEALED = 0,   // in the sealed pool, in the storage format
  OPEN = 1,     // in the open pool, exact
  SCRATCH = 2,  // in this step's scratch, exact: blocks that fill in this step and are stored lossily
};

struct Geometry {
  int num_q_heads, num_kv_heads, k_width, v_width, block_tokens;
  int k_format, v_format;  // of sealed blocks
  int exact_format;        // of open and scratch blocks, of q, k, v and out
};

// One layer's part of a block, from its first byte:
//   keys    [num_kv_heads][k_width][block_tokens]   (channels outermost: 16 tokens are one vector register)
//   k scales [num_kv_heads][block_tokens] f32       (int8 only)
//   values  [num_kv_heads][block_tokens][v_width]
//   v scales [num_kv_heads][block_tokens] f32       (int8 only)
struct LayerBytes {
  size_t k_scales, v, v_scales, total;
  LayerBytes(const Geometry& g, int k_format, int v_format) {
    const size_t tokens = size_t(g.num_kv_heads) * g.block_tokens;
    k_scales = tokens * g.k_width * value_bytes(k_format);
    v = k_scales + tokens * scale_bytes(k_format);
    v_scales = v + tokens * g.v_width * value_bytes(v_format);
    total = v_scales + tokens * scale_bytes(v_format);
  }
};

struct Area {  // block i of one source, at one layer, starts at base + i * stride
  uint8_t* base;
  int64_t stride;
  uint8_t* block(int64_t i) const { return base + i * stride; }
};

struct Rows {  // a [num_rows][num_heads][width] tensor whose rows lie row_stride elements apart
  void* data;
  int64_t row_stride;
};

}  // namespace kvfolio

// What the kernels are told: shapes, formats and where bytes lie. Plain data, raw pointers, no torch, no Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvfolio {

// How numbers are stored. Packed ones of B bits are PACKED + B: 16 numbers share 2 * B bytes.
enum Code : int { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, E4M3 = 4, E5M2 = 5, PACKED = 10 };

enum Scales : int {
  NO_SCALES = 0,
  VECTOR_F32 = 1,   // one a vector: value = code * scale
  VECTOR_BF16 = 2,
  CHANNEL = 3,      // keys: a least value and a step of each channel of the block, bf16: value = least + code * step
};

constexpr int PACK = 16;

struct Format {
  int code, scales;
  bool is_rotated;  // vectors are rotated before they are rounded
  bool is_packed() const { return code > PACKED; }
  int bits() const { return is_packed() ? code - PACKED : code == F32 ? 32 : code == BF16 || code == F16 ? 16 : 8; }
  // Numbers of one vector as they are stored: in whole packs.
  int padded(int width) const { return is_packed() ? (width + PACK - 1) / PACK * PACK : width; }
  int code_bytes(int width) const { return padded(width) * bits() / 8; }  // of one vector
  int scales_bytes(int width, int block_tokens) const {                   // of one vector, or its share
    if (scales == CHANNEL) return (padded(width) * 4 + block_tokens - 1) / block_tokens;
    return scales == VECTOR_F32 ? 4 : scales == VECTOR_BF16 ? 2 : 0;
  }
};

// Where a block may lie during a step.
enum Source : int {
  SEALED = 0,   // in the sealed pool, in the storage format
  OPEN = 1,     // in the open pool, exact
  SCRATCH = 2,  // in this step's scratch, exact: blocks that fill in this step and are stored lossily
  SINKS = 3,    // in the pool of first blocks that are kept exact
};
constexpr int NUM_SOURCES = 4;

struct Geometry {
  int num_q_heads, num_kv_heads, k_width, v_width, block_tokens;
  bool v_is_prefix_of_k;  // latent layers: the first v_width numbers of a key are its value, stored once, as a value
  Format k, v;   // of sealed blocks
  Format exact;  // of all other blocks, of q, k, v and out
  int own_k_at() const { return v_is_prefix_of_k ? v_width : 0; }  // where the key's own part begins, stored as a key
  int own_k_width() const { return k_width - own_k_at(); }
};

// One layer's part of a block, from its first byte: keys of all heads, their scales, values of all heads, their scales.
//   keys   [num_kv_heads][own_k_width][block_tokens]   (channels outermost: 16 tokens are one vector register)
//   values [num_kv_heads][block_tokens][v_width]
//   (widths of packed formats in whole packs)
//   scales [num_kv_heads][block_tokens], or [num_kv_heads][least values | steps][own_k_width]
struct LayerBytes {
  size_t head_k, head_k_scales, head_v, head_v_scales;  // bytes of one head
  size_t k_scales, v, v_scales, total;                  // where the parts begin
  LayerBytes(const Geometry& g, const Format& k, const Format& v_format)
      : head_k(size_t(g.block_tokens) * k.code_bytes(g.own_k_width())),
        head_k_scales(size_t(g.block_tokens) * k.scales_bytes(g.own_k_width(), g.block_tokens)),
        head_v(size_t(g.block_tokens) * v_format.code_bytes(g.v_width)),
        head_v_scales(size_t(g.block_tokens) * v_format.scales_bytes(g.v_width, g.block_tokens)) {
    const size_t heads = size_t(g.num_kv_heads);
    k_scales = heads * head_k;
    v = k_scales + heads * head_k_scales;
    v_scales = v + heads * head_v;
    total = v_scales + heads * head_v_scales;
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

// One table of functions an instruction set; the choice is made once, when the kernels are loaded.
#pragma once
#include <cstdint>

#include "plan_arrays.hpp"
#include "shapes.hpp"

namespace kvfolio {

struct AttendArgs {
  PlanArrays plan;
  Geometry geometry;
  Area areas[NUM_SOURCES];  // by Source, at this layer; scratch is one layer wide
  Rows q, k, v;    // [num_rows][heads][width] of the exact format
  void* out;       // [num_rows][num_q_heads][v_width], contiguous
  float scale;
  const float* sink_logits;  // [num_q_heads]: a term of each softmax's denominator that has no value; or null
  float* partials;    // room for the largest wave: [num_slots][num_q_heads][v_width + 2]
  int num_threads;
};

struct LinearArgs {  // y = x @ weight.T + bias
  const void* x;       // [num_rows][in]
  const void* weight;  // [out][in]
  const void* bias;    // [out] or null
  void* y;             // [num_rows][out]
  float* x_f32;        // scratch [num_rows, or num_threads times up to 4 of them][in rounded up to 32]
  int64_t num_rows, in, out;
  int format;          // of x, weight, bias and y: F32, BF16 or F16
  int num_threads;
};

struct HeadLinearArgs {  // of each head: y = x @ weight.T
  const void* x;       // [num_heads][num_rows][in]
  const void* weight;  // [num_heads][out][in]
  void* y;             // [num_heads][num_rows][out]
  float* x_f32;        // scratch [num_threads][num_rows][in rounded up to 32]
  int64_t num_heads, num_rows, in, out;
  int format, num_threads;
};

struct NormArgs {
  Rows x;              // [num_rows][num_heads][width]
  const void* residual;  // added first, sum written to `sum`; or null. Contiguous.
  void* sum;
  const float* weight;  // [width]
  void* y;              // [num_rows][num_heads][width], contiguous
  int64_t num_rows, num_heads, width;
  float eps;
  int format;
  int num_threads;
};

struct RopeArgs {  // in place
  Rows x;            // [num_rows][num_heads][width]
  const float* cos;  // [num_rows][half]
  const float* sin;
  int64_t num_rows, num_heads, width, half;
  int format;
  int num_threads;
};

enum Activation : int { SILU = 0, GELU_TANH = 1 };

struct GatedArgs {  // y = activation(gate) * up
  const void* gate_up;  // [num_rows][2 * width]
  void* y;              // [num_rows][width]
  int64_t num_rows, width;
  int activation, format, num_threads;
};

struct Table {
  const char* name;
  void (*attend)(const AttendArgs&);
  void (*linear)(const LinearArgs&);
  void (*head_linear)(const HeadLinearArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*rope)(const RopeArgs&);
  void (*gated)(const GatedArgs&);
  double (*read_bandwidth)(const uint8_t* data, int64_t num_bytes, int num_threads);
};

extern const Table table_plain;
#if defined(__x86_64__)
extern const Table table_avx2;
extern const Table table_avx512;
#endif

}  // namespace kvfolio

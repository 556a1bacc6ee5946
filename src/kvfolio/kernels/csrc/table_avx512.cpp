// The kernels, compiled for AVX512.
#include "table.hpp"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#define KVFOLIO_AVX512

namespace kvfolio {
namespace {
#include "vector.inc"
#include "codes.inc"
#include "attend_rows.inc"
#include "seal.inc"
#include "write.inc"
#include "attend.inc"
#include "bandwidth.inc"
#include "linear.inc"
#include "pointwise.inc"
}  // namespace

extern const Table table_avx512 = {"avx512", attend, linear, head_linear, rms_norm, rope, gated, read_bandwidth};

}  // namespace kvfolio

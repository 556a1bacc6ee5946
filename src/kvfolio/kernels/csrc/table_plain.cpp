// The kernels, compiled for any machine.
#include "table.hpp"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>


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

extern const Table table_plain = {"plain", attend, linear, head_linear, rms_norm, rope, gated, read_bandwidth};

}  // namespace kvfolio

// Builds the attention plan of one step and one layer group. Built once a step, used by every layer of the group.
// Knows nothing of tensors or numbers in them.
#pragma once
#include <cstdint>
#include <vector>

#include "plan_arrays.hpp"

namespace kvfolio {


struct Sequence {            // one chunk, as the scheduler cut it
  int32_t start;             // position of its first token
  int32_t num_tokens;
  int32_t first_block;       // index of the first block in `sealed`
  int32_t sealed_begin, sealed_end;  // its slice of `PlanInput::sealed`
  int32_t sinks_begin, sinks_end;    // and of `PlanInput::sinks`: its blocks 0, 1, … that are kept exact
  int32_t open_slot;
};

struct PlanInput {
  int block_tokens, run_blocks;
  int window;                // 0: none
  bool lossless;             // sealed blocks store exactly what was computed
  int64_t slot_floats;       // floats of one partial over all query heads: bounds the memory of a wave
  std::vector<Sequence> sequences;
  std::vector<int32_t> sealed, sinks;
};

struct AttentionPlan {
  int block_tokens, run_blocks, window;
  int32_t num_rows = 0, num_scratch = 0;
  std::vector<int32_t> row, position;
  std::vector<Item> items;
  std::vector<Unit> units;
  std::vector<Wave> waves;
  std::vector<int64_t> merge_begin, merge_slot;
  std::vector<int32_t> write_source, write_block, write_offset;
  std::vector<Carry> carries;
  std::vector<Seal> seals;

  explicit AttentionPlan(const PlanInput& input);
  PlanArrays arrays() const;  // valid while the plan lives
};

}  // namespace kvfolio

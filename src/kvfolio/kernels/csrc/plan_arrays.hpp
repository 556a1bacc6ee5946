// The attention plan of one step and one layer group, as the kernels see it: plain arrays.
// Which query reads which block; each distinct block is listed once for all queries of its unit.
//
// A query's reduction is cut into fixed runs of `run_blocks` blocks, counted from the start of its sequence. A run yields a
// partial (max, sum, output); partials are merged in run order. So the result depends on the position alone (law 2).
#pragma once
#include <cstdint>

namespace kvfolio {

struct Item {                // one distinct block of a unit
  int32_t source, block;     // where it lies
  int32_t index;             // its place in the run
  int32_t query_begin, query_end;  // the unit's queries that read it
  bool own;                  // it is these queries' own block: causal mask, exact form
};

struct Unit {                // one run of blocks, and the queries that read any of them
  int32_t run;
  int32_t item_begin, item_end;
  int32_t query_begin, query_end;  // into `row` and `position`
  int64_t slot_begin;        // partial of query i of the unit: slot_begin + i
};

struct Wave {                // rows whose partials are in memory at the same time
  int32_t unit_begin, unit_end, row_begin, row_end;
  int64_t num_slots;
};

struct Carry {               // tokens of an open block that fills in this step go where the whole block goes
  int32_t open_slot, source, block, num_tokens;
};

struct Seal {                // scratch block → sealed block, and as it is → sink block; -1: none
  int32_t scratch, block, sink;
};

struct PlanArrays {
  int block_tokens, run_blocks, window;        // window 0: none
  int32_t num_rows, num_waves, num_carries, num_seals;
  const int32_t *row, *position;               // a unit's query → row of q, position in its sequence
  const Item* items;
  const Unit* units;
  const Wave* waves;
  const int64_t *merge_begin, *merge_slot;     // row r's partials, in run order: merge_slot[merge_begin[r] … )
  const int32_t *write_source, *write_block, *write_offset;  // where row r's key and value go
  const Carry* carries;
  const Seal* seals;
};

}  // namespace kvfolio

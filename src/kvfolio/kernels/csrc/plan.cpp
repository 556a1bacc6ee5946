// Builds the attention plan: sequences are cut into runs, runs that start with the same block are joined into units.
// Pure bookkeeping on integers; compiled once, for every instruction set.
#include "plan.hpp"

#include <algorithm>
#include <map>

#include "shapes.hpp"

namespace kvfolio {
namespace {

constexpr int32_t MAX_UNIT_QUERIES = 64;             // more: the unit is split, so that threads share the work
constexpr int64_t MAX_WAVE_FLOATS = int64_t(16) << 20;  // 64 MiB of partials

struct Piece {  // consecutive queries of one sequence in one run
  int32_t sequence, query_begin, query_end;  // relative to the sequence's first token of this step
};

struct Place {
  int32_t source, block;
  bool operator==(const Place& other) const { return source == other.source && block == other.block; }
  bool operator<(const Place& other) const { return source != other.source ? source < other.source : block < other.block; }
};

constexpr Place NOWHERE{-1, -1};

class Builder {
 public:
  Builder(const PlanInput& input, AttentionPlan& plan) : in_(input), plan_(plan) {
    int32_t row = 0;
    for (const Sequence& s : in_.sequences) {
      first_row_.push_back(row);
      first_scratch_.push_back(plan_.num_scratch);
      row += s.num_tokens;
      if (!in_.lossless) plan_.num_scratch += num_filled(s);
    }
    plan_.num_rows = row;
  }

  void writes() {
    const int T = in_.block_tokens;
    for (size_t i = 0; i < in_.sequences.size(); ++i) {
      const Sequence& s = in_.sequences[i];
      for (int32_t t = 0; t < s.num_tokens; ++t) {
        const Place place = own(i, (s.start + t) / T);
        plan_.write_source.push_back(place.source);
        plan_.write_block.push_back(place.block);
        plan_.write_offset.push_back((s.start + t) % T);
      }
      const int32_t first = s.start / T;
      if (s.start % T != 0 && num_filled(s) > 0) {
        const Place place = own(i, first);
        plan_.carries.push_back({s.open_slot, place.source, place.block, s.start % T});
      }
      if (!in_.lossless)
        for (int32_t b = 0; b < num_filled(s); ++b)
          plan_.seals.push_back({first_scratch_[i] + b, sealed(s, first + b), sink(s, first + b)});
    }
  }

  void waves() {
    std::vector<std::vector<int64_t>> slots(plan_.num_rows);  // partials of each row, in run order
    const int64_t max_slots = std::max<int64_t>(1, MAX_WAVE_FLOATS / in_.slot_floats);
    for (int32_t row = 0; row < plan_.num_rows;) {
      Wave wave{int32_t(plan_.units.size()), 0, row, row, 0};
      std::vector<Piece> pieces;
      row = gather(row, max_slots, pieces);
      wave.row_end = row;
      num_slots_ = 0;
      units_of(pieces, slots);
      wave.unit_end = int32_t(plan_.units.size());
      wave.num_slots = num_slots_;
      plan_.waves.push_back(wave);
    }
    plan_.merge_begin.push_back(0);
    for (const auto& of_row : slots) {
      plan_.merge_slot.insert(plan_.merge_slot.end(), of_row.begin(), of_row.end());
      plan_.merge_begin.push_back(int64_t(plan_.merge_slot.size()));
    }
  }

 private:
  // Blocks of the sequence that become full in this step.
  int32_t num_filled(const Sequence& s) const {
    return (s.start + s.num_tokens) / in_.block_tokens - s.start / in_.block_tokens;
  }

  int32_t sealed(const Sequence& s, int32_t block) const { return in_.sealed[s.sealed_begin + block - s.first_block]; }

  int32_t sink(const Sequence& s, int32_t block) const {  // -1: it is none
    return block < s.sinks_end - s.sinks_begin ? in_.sinks[s.sinks_begin + block] : -1;
  }

  // Where others than its own queries read a block.
  Place stored(const Sequence& s, int32_t block) const {
    const int32_t id = sink(s, block);
    return id >= 0 ? Place{SINKS, id} : Place{SEALED, sealed(s, block)};
  }

  int32_t run_tokens() const { return in_.run_blocks * in_.block_tokens; }

  int32_t first_needed(int32_t position) const {
    return in_.window == 0 ? 0 : std::max(0, position - in_.window + 1);
  }

  // Where the exact form of a block that is written in this step lies.
  Place own(size_t i, int32_t block) const {
    const Sequence& s = in_.sequences[i];
    if ((block + 1) * in_.block_tokens > s.start + s.num_tokens) return {OPEN, s.open_slot};
    if (in_.lossless) return {SEALED, sealed(s, block)};
    return {SCRATCH, first_scratch_[i] + block - s.start / in_.block_tokens};
  }

  int32_t first_run(int32_t position) const { return first_needed(position) / run_tokens(); }
  int32_t last_run(int32_t position) const { return position / run_tokens(); }

  // Takes rows from `row` on until their partials fill the wave; returns the first row left out.
  int32_t gather(int32_t row, int64_t max_slots, std::vector<Piece>& pieces) const {
    int64_t num_slots = 0;
    for (size_t i = 0; i < in_.sequences.size(); ++i) {
      const Sequence& s = in_.sequences[i];
      if (first_row_[i] + s.num_tokens <= row) continue;
      const int32_t begin = row - first_row_[i];
      int32_t end = begin;
      for (; end < s.num_tokens; ++end) {
        const int32_t position = s.start + end;
        const int64_t more = last_run(position) - first_run(position) + 1;
        if (num_slots > 0 && num_slots + more > max_slots) break;
        num_slots += more;
      }
      if (end > begin) pieces.push_back({int32_t(i), begin, end});
      row = first_row_[i] + end;
      if (end < s.num_tokens) break;
    }
    return row;
  }

  void units_of(const std::vector<Piece>& pieces, std::vector<std::vector<int64_t>>& slots) {
    std::map<int32_t, std::vector<Piece>> by_run;
    for (const Piece& piece : pieces) {
      const Sequence& s = in_.sequences[piece.sequence];
      for (int32_t run = first_run(s.start + piece.query_begin); run <= last_run(s.start + piece.query_end - 1); ++run) {
        // Queries before the run do not see it; with a window, queries far behind it do not either.
        const int32_t begin = std::max(piece.query_begin, run * run_tokens() - s.start);
        int32_t end = piece.query_end;
        if (in_.window != 0) end = std::min(end, (run + 1) * run_tokens() + in_.window - 1 - s.start);
        for (int32_t q = begin; q < end; q += MAX_UNIT_QUERIES)
          by_run[run].push_back({piece.sequence, q, std::min(q + MAX_UNIT_QUERIES, end)});
      }
    }
    for (auto& [run, of_run] : by_run) {
      std::stable_sort(of_run.begin(), of_run.end(), [this, run = run](const Piece& a, const Piece& b) {
        return compare(a, b, run) < 0;
      });
      for (size_t begin = 0; begin < of_run.size();) {
        size_t end = begin;
        int32_t num_queries = 0;
        while (end < of_run.size() && (end == begin || first_block(of_run[end], run) == first_block(of_run[begin], run))) {
          const int32_t more = of_run[end].query_end - of_run[end].query_begin;
          if (end > begin && (num_queries + more > MAX_UNIT_QUERIES || first_block(of_run[end], run) == NOWHERE)) break;
          num_queries += more;
          ++end;
        }
        unit(run, &of_run[begin], &of_run[end - 1] + 1, slots);
        begin = end;
      }
    }
  }

  // Blocks of the run that every query of the piece may read in stored form: those before the first query's own.
  int32_t stored_end(const Piece& p, int32_t run) const {
    const Sequence& s = in_.sequences[p.sequence];
    return std::min((run + 1) * in_.run_blocks, (s.start + p.query_begin) / in_.block_tokens);
  }
  int32_t stored_begin(const Piece& p, int32_t run) const {
    return std::max(run * in_.run_blocks, in_.sequences[p.sequence].first_block);
  }

  // The first stored block of the run; NOWHERE when the piece reads only blocks of its own there.
  Place first_block(const Piece& p, int32_t run) const {
    const int32_t begin = stored_begin(p, run);
    return begin < stored_end(p, run) ? stored(in_.sequences[p.sequence], begin) : NOWHERE;
  }

  // Lexicographic by the run's stored blocks, so that pieces with a common prefix of blocks are neighbours.
  int compare(const Piece& a, const Piece& b, int32_t run) const {
    const int32_t begin_a = stored_begin(a, run), begin_b = stored_begin(b, run);
    if (begin_a != begin_b) return begin_a < begin_b ? -1 : 1;
    const int32_t end_a = stored_end(a, run), end_b = stored_end(b, run);
    for (int32_t block = begin_a; block < end_a && block < end_b; ++block) {
      const Place x = stored(in_.sequences[a.sequence], block), y = stored(in_.sequences[b.sequence], block);
      if (!(x == y)) return x < y ? -1 : 1;
    }
    return end_a < end_b ? -1 : end_a > end_b ? 1 : 0;
  }

  void unit(int32_t run, const Piece* begin, const Piece* end, std::vector<std::vector<int64_t>>& slots) {
    Unit unit{run, int32_t(plan_.items.size()), 0, int32_t(plan_.row.size()), 0, num_slots_};
    std::vector<int32_t> offset;  // of each piece within the unit
    int32_t num_queries = 0;
    for (const Piece* p = begin; p != end; ++p) {
      offset.push_back(num_queries);
      const Sequence& s = in_.sequences[p->sequence];
      for (int32_t q = p->query_begin; q < p->query_end; ++q) {
        const int32_t row = first_row_[p->sequence] + q;
        plan_.row.push_back(row);
        plan_.position.push_back(s.start + q);
        slots[row].push_back(num_slots_++);
        ++num_queries;
      }
    }
    for (int32_t index = 0; index < in_.run_blocks; ++index)
      for (const Piece* p = begin; p != end; ++p) items(run, index, *p, offset[p - begin], unit.item_begin);
    unit.item_end = int32_t(plan_.items.size());
    unit.query_end = int32_t(plan_.row.size());
    plan_.units.push_back(unit);
  }

  // The piece's queries against block `index` of the run: those inside the block, then those behind it.
  void items(int32_t run, int32_t index, const Piece& p, int32_t offset, int32_t item_begin) {
    const Sequence& s = in_.sequences[p.sequence];
    const int T = in_.block_tokens;
    const int32_t block = run * in_.run_blocks + index;
    const auto query = [&](int32_t position) { return std::clamp(position - s.start, p.query_begin, p.query_end); };
    const int32_t inside = query(block * T), behind = query((block + 1) * T);
    int32_t gone = p.query_end;  // with a window: the first query that no longer sees the block
    if (in_.window != 0) gone = query((block + 1) * T + in_.window - 1);
    const auto local = [&](int32_t q) { return offset + q - p.query_begin; };
    if (inside < behind) {
      const Place place = own(p.sequence, block);
      plan_.items.push_back({place.source, place.block, index, local(inside), local(behind), true});
    }
    if (behind < gone && block >= s.first_block) {
      const Place place = stored(s, block);
      if (int32_t(plan_.items.size()) > item_begin) {
        Item& last = plan_.items.back();
        if (!last.own && last.index == index && Place{last.source, last.block} == place && last.query_end == local(behind)) {
          last.query_end = local(gone);
          return;
        }
      }
      plan_.items.push_back({place.source, place.block, index, local(behind), local(gone), false});
    }
  }

  const PlanInput& in_;
  AttentionPlan& plan_;
  std::vector<int32_t> first_row_, first_scratch_;  // of each sequence
  int64_t num_slots_ = 0;
};

}  // namespace

AttentionPlan::AttentionPlan(const PlanInput& input)
    : block_tokens(input.block_tokens), run_blocks(input.run_blocks), window(input.window) {
  Builder builder(input, *this);
  builder.writes();
  builder.waves();
}

PlanArrays AttentionPlan::arrays() const {
  return {block_tokens,        run_blocks,          window,
          num_rows,            int32_t(waves.size()), int32_t(carries.size()),
          int32_t(seals.size()), row.data(),        position.data(),
          items.data(),        units.data(),        waves.data(),
          merge_begin.data(),  merge_slot.data(),   write_source.data(),
          write_block.data(),  write_offset.data(), carries.data(),
          seals.data()};
}

}  // namespace kvfolio

// The door from Python: addresses and numbers in, nothing computed here. Types and shapes are checked in native.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "plan.hpp"
#include "table.hpp"

namespace nb = nanobind;
using namespace kvfolio;

namespace {

template <typename T = void> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

std::vector<std::string> instruction_sets() {  // best first
  std::vector<std::string> names;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    names.push_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    names.push_back("avx2");
#endif
  names.push_back("plain");
  return names;
}

// Whether bf16 products beat f32 ones here. AMX and AMD's AVX512-BF16 do; Intel's vdpbf16ps runs at half the rate of f32.
bool has_quick_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("amx-bf16") || (__builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16"));
#else
  return true;
#endif
}

const Table& find_table(const std::string& name) {
  for (const std::string& known : instruction_sets()) {
    if (known != name) continue;
#if defined(__x86_64__)
    if (name == "avx512") return table_avx512;
    if (name == "avx2") return table_avx2;
#endif
    return table_plain;
  }
  throw std::invalid_argument("instruction set " + name + " is not available on this machine");
}

typedef std::tuple<int, int, int, int, int, int, int, int> SequenceTuple;

AttentionPlan make_plan(int block_tokens, int run_blocks, int window, bool lossless, int64_t slot_floats,
                        const std::vector<SequenceTuple>& sequences, std::vector<int32_t> sealed,
                        std::vector<int32_t> sinks) {
  PlanInput input{block_tokens, run_blocks, window, lossless, slot_floats, {}, std::move(sealed), std::move(sinks)};
  for (const auto& [start, num_tokens, first_block, begin, end, sinks_begin, sinks_end, open_slot] : sequences)
    input.sequences.push_back({start, num_tokens, first_block, begin, end, sinks_begin, sinks_end, open_slot});
  return AttentionPlan(input);
}

// Everything the plan decided, for tests and for explaining a step.
nb::dict describe(const AttentionPlan& plan) {
  nb::list units;
  for (const Unit& unit : plan.units) {
    nb::list items, queries;
    for (int i = unit.item_begin; i < unit.item_end; ++i) {
      const Item& item = plan.items[i];
      items.append(nb::make_tuple(item.source, item.block, item.index, item.query_begin, item.query_end, item.own));
    }
    for (int i = unit.query_begin; i < unit.query_end; ++i) queries.append(nb::make_tuple(plan.row[i], plan.position[i]));
    nb::dict entry;
    entry["run"] = unit.run;
    entry["items"] = items;
    entry["queries"] = queries;
    units.append(entry);
  }
  nb::dict result;
  result["units"] = units;
  result["num_waves"] = plan.waves.size();
  result["num_scratch"] = plan.num_scratch;
  result["num_seals"] = plan.seals.size();
  result["num_carries"] = plan.carries.size();
  return result;
}

int64_t max_slots(const AttentionPlan& plan) {
  int64_t most = 0;
  for (const Wave& wave : plan.waves) most = wave.num_slots > most ? wave.num_slots : most;
  return most;
}

class Kernels {
 public:
  Kernels(const std::string& name, int num_threads) : table_(find_table(name)), num_threads_(num_threads) {}

  void attend(const AttentionPlan& plan, const Geometry& geometry, const std::vector<uintptr_t>& bases,
              const std::vector<int64_t>& strides, const std::vector<uintptr_t>& qkv, const std::vector<int64_t>& row_strides,
              uintptr_t out, uintptr_t partials, float scale, uintptr_t sink_logits) const {
    AttendArgs args{};
    args.plan = plan.arrays();
    args.geometry = geometry;
    for (int i = 0; i < NUM_SOURCES; ++i) args.areas[i] = {pointer<uint8_t>(bases.at(i)), strides.at(i)};
    args.q = {pointer(qkv.at(0)), row_strides.at(0)};
    args.k = {pointer(qkv.at(1)), row_strides.at(1)};
    args.v = {pointer(qkv.at(2)), row_strides.at(2)};
    args.out = pointer(out);
    args.partials = pointer<float>(partials);
    args.scale = scale;
    args.sink_logits = pointer<float>(sink_logits);
    args.num_threads = num_threads_;
    nb::gil_scoped_release release;
    table_.attend(args);
  }

  void linear(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, uintptr_t x_f32, int64_t num_rows, int64_t in,
              int64_t out, int format) const {
    const LinearArgs args{pointer(x), pointer(weight), pointer(bias), pointer(y), pointer<float>(x_f32), num_rows, in, out,
                          format, num_threads_};
    nb::gil_scoped_release release;
    table_.linear(args);
  }

  void head_linear(uintptr_t x, uintptr_t weight, uintptr_t y, uintptr_t x_f32, const std::vector<int64_t>& shape,
                   int format) const {
    const HeadLinearArgs args{pointer(x), pointer(weight), pointer(y), pointer<float>(x_f32), shape.at(0), shape.at(1),
                              shape.at(2), shape.at(3), format, num_threads_};
    nb::gil_scoped_release release;
    table_.head_linear(args);
  }

  void rms_norm(uintptr_t x, int64_t row_stride, uintptr_t residual, uintptr_t sum, uintptr_t weight, uintptr_t y,
                const std::vector<int64_t>& shape, float eps, int format) const {
    const NormArgs args{{pointer(x), row_stride}, pointer(residual), pointer(sum), pointer<float>(weight), pointer(y),
                        shape.at(0), shape.at(1), shape.at(2), eps, format, num_threads_};
    nb::gil_scoped_release release;
    table_.rms_norm(args);
  }

  void rope(uintptr_t x, int64_t row_stride, uintptr_t cos, uintptr_t sin, const std::vector<int64_t>& shape,
            int64_t half, int format) const {
    const RopeArgs args{{pointer(x), row_stride}, pointer<float>(cos), pointer<float>(sin), shape.at(0), shape.at(1),
                        shape.at(2), half, format, num_threads_};
    nb::gil_scoped_release release;
    table_.rope(args);
  }

  void gated(uintptr_t gate_up, uintptr_t y, int64_t num_rows, int64_t width, int activation, int format) const {
    const GatedArgs args{pointer(gate_up), pointer(y), num_rows, width, activation, format, num_threads_};
    nb::gil_scoped_release release;
    table_.gated(args);
  }

  double read_bandwidth(uintptr_t data, int64_t num_bytes) const {
    nb::gil_scoped_release release;
    return table_.read_bandwidth(pointer<uint8_t>(data), num_bytes, num_threads_);
  }

  std::string name() const { return table_.name; }

 private:
  const Table& table_;
  int num_threads_;
};

}  // namespace

NB_MODULE(_native, m) {
  m.def("instruction_sets", &instruction_sets, "Instruction sets this machine can run, best first.");
  m.def("has_quick_bf16", &has_quick_bf16, "Whether bf16 products beat f32 ones on this machine.");
  nb::class_<Geometry>(m, "Geometry")
      .def("__init__", [](Geometry* self, const std::vector<int>& n) {
        if (n.size() != 15) throw std::invalid_argument("Geometry takes 15 numbers");
        const auto format = [&n](size_t i) { return Format{n[i], n[i + 1], n[i + 2] != 0}; };
        new (self) Geometry{n[0], n[1], n[2], n[3], n[4], n[5] != 0, format(6), format(9), format(12)};
      });
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def_prop_ro("num_rows", [](const AttentionPlan& p) { return p.num_rows; })
      .def_prop_ro("num_scratch", [](const AttentionPlan& p) { return p.num_scratch; })
      .def_prop_ro("max_slots", &max_slots)
      .def("describe", &describe);
  m.def("make_plan", &make_plan);
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<const std::string&, int>())
      .def_prop_ro("name", &Kernels::name)
      .def("attend", &Kernels::attend)
      .def("linear", &Kernels::linear)
      .def("head_linear", &Kernels::head_linear)
      .def("rms_norm", &Kernels::rms_norm)
      .def("rope", &Kernels::rope)
      .def("gated", &Kernels::gated)
      .def("read_bandwidth", &Kernels::read_bandwidth);
}

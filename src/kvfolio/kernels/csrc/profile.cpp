// How fast this machine reads memory: the limit that decode speed is printed beside.
#include <chrono>
#include <cstdint>

#include "table.hpp"

namespace kvfolio {

// Bytes a second of one pass over `data`, all threads reading their own part.
double read_bandwidth(const uint8_t* data, int64_t num_bytes, int num_threads) {
  const int64_t num_words = num_bytes / 8;
  const uint64_t* words = reinterpret_cast<const uint64_t*>(data);
  uint64_t total = 0;
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for schedule(static) reduction(+ : total) num_threads(num_threads)
  for (int64_t block = 0; block < num_words / 512; ++block) {
    uint64_t acc[8] = {};
    for (int64_t i = block * 512; i < (block + 1) * 512; i += 8)
      for (int lane = 0; lane < 8; ++lane) acc[lane] += words[i + lane];
    for (int lane = 0; lane < 8; ++lane) total += acc[lane];
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  volatile uint64_t sink = total;
  (void)sink;
  return double(num_bytes) / seconds;
}

}  // namespace kvfolio

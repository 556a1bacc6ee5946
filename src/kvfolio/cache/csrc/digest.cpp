// The digests of a chain of cache blocks: keyed BLAKE2b-256 (RFC 7693) over token ids read straight from a Python list.
// Knows nothing of what a key or a digest is for. digest.py defines the fields, checks arguments, and is its twin.
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

constexpr size_t BLOCK_BYTES = 128;  // of BLAKE2b, not of the cache
constexpr size_t DIGEST_BYTES = 32;
constexpr size_t MAX_KEY_BYTES = 64;
constexpr size_t FIELD_HEAD = 5;  // one byte of type, four of length
constexpr uint8_t PARENT = 1, TOKENS = 2;

typedef std::array<uint64_t, 8> State;

constexpr State START = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                         0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t ORDER[10][16] = {  // SIGMA in section 2.7
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

// Byte by byte, so that the order of bytes is the same on every machine; compilers make one instruction of it.
inline uint64_t load(const uint8_t* at) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= uint64_t(at[i]) << (8 * i);
  return word;
}

template <typename Word> inline void store(uint8_t* at, Word word) {
  for (size_t i = 0; i < sizeof(Word); ++i) at[i] = uint8_t(word >> (8 * i));
}

inline uint64_t rotate(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = rotate(d ^ a, 32);
  c += d;
  b = rotate(b ^ c, 24);
  a += b + y;
  d = rotate(d ^ a, 16);
  c += d;
  b = rotate(b ^ c, 63);
}

template <size_t ROUND> [[gnu::always_inline]] inline void round(uint64_t (&v)[16], const uint64_t (&m)[16]) {
  constexpr const uint8_t(&s)[16] = ORDER[ROUND % 10];
  mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <size_t... ROUNDS>
[[gnu::always_inline]] inline void all_rounds(uint64_t (&v)[16], const uint64_t (&m)[16], std::index_sequence<ROUNDS...>) {
  (round<ROUNDS>(v, m), ...);
}

// F in section 3.2; `counted`: bytes hashed so far, these included.
void compress(State& h, const uint8_t* bytes, uint64_t counted, bool last) {
  uint64_t v[16], m[16];
  for (int i = 0; i < 16; ++i) m[i] = load(bytes + 8 * i);
  for (int i = 0; i < 8; ++i) v[i] = h[i], v[i + 8] = START[i];
  v[12] ^= counted;
  if (last) v[14] = ~v[14];
  all_rounds(v, m, std::make_index_sequence<12>());
  for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

// The state after the block that the key fills: the same for every digest of a call.
State start_keyed(const uint8_t* key, size_t key_bytes) {
  uint8_t padded[BLOCK_BYTES] = {};
  std::memcpy(padded, key, key_bytes);
  State h = START;
  h[0] ^= 0x01010000 ^ key_bytes << 8 ^ DIGEST_BYTES;
  compress(h, padded, BLOCK_BYTES, false);
  return h;
}

// A message of two fields, with zeros behind it up to a whole number of BLAKE2b's blocks.
class Message {
 public:
  Message(size_t parent_bytes, size_t num_tokens)
      : parent_bytes_(parent_bytes),
        num_bytes_(2 * FIELD_HEAD + parent_bytes + 4 * num_tokens),
        bytes_((num_bytes_ + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES) {
    write_head(0, PARENT, parent_bytes);
    write_head(FIELD_HEAD + parent_bytes, TOKENS, 4 * num_tokens);
  }

  uint8_t* parent() { return bytes_.data() + FIELD_HEAD; }
  uint8_t* tokens() { return parent() + parent_bytes_ + FIELD_HEAD; }

  void digest(State h, uint8_t* out) const {
    size_t done = 0;
    for (; num_bytes_ - done > BLOCK_BYTES; done += BLOCK_BYTES)
      compress(h, bytes_.data() + done, done + 2 * BLOCK_BYTES, false);
    compress(h, bytes_.data() + done, num_bytes_ + BLOCK_BYTES, true);
    for (size_t i = 0; i < DIGEST_BYTES / 8; ++i) store(out + 8 * i, h[i]);
  }

 private:
  void write_head(size_t at, uint8_t type, size_t length) {
    bytes_[at] = type;
    store(bytes_.data() + at + 1, uint32_t(length));
  }

  size_t parent_bytes_, num_bytes_;
  std::vector<uint8_t> bytes_;
};

// Writes ids as u32; false at the first that is no int, or does not fit.
bool write_tokens(PyObject* const* ids, size_t num_tokens, uint8_t* out) {
  for (size_t i = 0; i < num_tokens; ++i) {
    if (!PyLong_Check(ids[i])) return false;
    int overflow;
    long long id = PyLong_AsLongLongAndOverflow(ids[i], &overflow);
    if (overflow || id < 0 || id > UINT32_MAX) return false;
    store(out + 4 * i, uint32_t(id));
  }
  return true;
}

// None when an id is no int of 32 bits: the twin then says which.
nb::object chain_digests(nb::bytes key, nb::bytes parent, nb::handle token_ids, size_t start, size_t num_blocks,
                         size_t block_tokens) {
  nb::object sequence = nb::steal(PySequence_Fast(token_ids.ptr(), "token ids are a list or a tuple"));
  if (!sequence.is_valid()) throw nb::python_error();
  nb::object digests = nb::steal(PyList_New(Py_ssize_t(num_blocks)));
  if (!digests.is_valid()) throw nb::python_error();
  // From here on nothing runs Python code, so the list of ids stays as it is.
  size_t num_ids = size_t(PySequence_Fast_GET_SIZE(sequence.ptr()));
  if (key.size() < 1 || key.size() > MAX_KEY_BYTES || block_tokens < 1 || start > num_ids ||
      num_blocks > (num_ids - start) / block_tokens)
    throw nb::value_error("arguments that digest.py should have refused");

  PyObject** ids = PySequence_Fast_ITEMS(sequence.ptr()) + start;
  State keyed = start_keyed(static_cast<const uint8_t*>(key.data()), key.size());
  uint8_t digest[DIGEST_BYTES];
  auto append = [&](Message& message, size_t block) {
    if (!write_tokens(ids + block * block_tokens, block_tokens, message.tokens())) return false;
    message.digest(keyed, digest);
    PyObject* bytes = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digest), DIGEST_BYTES);
    if (!bytes) throw nb::python_error();
    PyList_SET_ITEM(digests.ptr(), Py_ssize_t(block), bytes);
    return true;
  };

  if (num_blocks == 0) return digests;
  Message first(parent.size(), block_tokens), later(DIGEST_BYTES, block_tokens);
  std::memcpy(first.parent(), parent.data(), parent.size());
  if (!append(first, 0)) return nb::none();
  for (size_t block = 1; block < num_blocks; ++block) {
    std::memcpy(later.parent(), digest, DIGEST_BYTES);
    if (!append(later, block)) return nb::none();
  }
  return digests;
}

}  // namespace

NB_MODULE(_digest, m) {
  m.def("chain_digests", &chain_digests, nb::arg("key"), nb::arg("parent"), nb::arg("token_ids"), nb::arg("start"),
        nb::arg("num_blocks"), nb::arg("block_tokens"));
}

// The table of everything the kernels can do: rules (optimizers), master formats, state formats, the triples of them
// that are compiled, and the wire formats. The daemon's validation, planner, help and metrics, the tests and the
// benchmarks all walk these lists; nothing else names an optimizer or a format.
//
// To add a state or master format: write kernels/formats/x.h, add it to the lists in cpu_tables.h.
// To add an optimizer: write kernels/rules/x.h, add it to the lists in cpu_tables.h, write its oracle in
// tests/oracle/reference.h.
//
// Plain functions over caller-owned memory: no allocation, no locks, no I/O. Thread-safe; concurrent updates of one
// tensor must be on disjoint tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ballast::kernels {

inline constexpr uint64_t kBlock = 32;   // consecutive elements that share a scale
inline constexpr uint64_t kPad = 256;    // storage is padded to a multiple of this
inline constexpr uint64_t kTile = 4096;  // unit of work and of reduction
inline constexpr int kMaxPlanes = 6;
inline constexpr int kMaxConstants = 16;

// What a stored array is for; the daemon reports bytes by it.
enum class Kind : uint8_t { kWeights, kMomentum, kVariance };

// One stored array of a tensor: `bytes` bytes for every `per` elements of the padded count.
struct Plane {
  const char* name;
  Kind kind;
  uint32_t bytes;
  uint32_t per;
};
constexpr uint64_t PaddedElements(uint64_t n) { return (n + kPad - 1) / kPad * kPad; }
constexpr uint64_t PlaneBytes(const Plane& p, uint64_t n) { return PaddedElements(n) / p.per * p.bytes; }

// A hyperparameter of a rule, in the rule's order. Valid: min <= x <= max, and x > min where open_min.
struct Hyper {
  const char* name;
  double value;  // default
  double min, max;
  bool open_min;
  bool open_max;
  const char* doc;
};

// A number format of payloads: gradients in, weights out.
struct WireFormat {
  const char* name;  // fp32, bf16, fp16
  uint32_t bytes;    // per element
};
// Index into WireFormats().
using WireIndex = int;

// Statistics of one tile (numerics, "Statistics and their order"), or of a tensor after Combine. `full` fields are
// filled at steps with full statistics only.
struct TileStatistics {
  float grad_sq;       // sum g^2
  float update_sq;     // sum d^2, d = wanted update
  float rms_sq;        // sum g^2 / max(vhat, eps^2)
  float grad_absmax;   // max |g| over finite g
  uint32_t nonfinite;  // gradient elements that are NaN or infinite
  uint32_t rejected;   // blocks that kept their old contents
  float weight_sq;     // full: sum x^2 before the update
  float stored_dot;    // full: sum d * (stored after - stored before)
  uint32_t unchanged;  // full: elements whose stored weight did not change
  uint32_t saturated;  // full: state codes at their largest level
};
struct Statistics {
  double grad_sq, update_sq, rms_sq, grad_absmax;
  uint64_t nonfinite, rejected;
  double weight_sq, stored_dot;
  uint64_t unchanged, saturated;
  bool full;
};
// Sums tiles in index order, in double.
Statistics Combine(std::span<const TileStatistics> tiles, bool full);

// One tensor's update. All pointers are 64-byte aligned; planes in the order of Kernel::planes.
struct Update {
  std::byte* planes[kMaxPlanes];
  const void* grad;  // n elements in wire format `grad_format`; may be unpadded
  WireIndex grad_format;
  uint64_t n;
  float grad_scale;     // g = RN(decoded * grad_scale)
  uint64_t random_key;  // RandomKey(...)
  bool stochastic;      // rounding of master and state; false: nearest
  bool full_statistics;
  float constants[kMaxConstants];  // from Kernel::prepare
};

// c of numerics 3: the key of one tensor's random bits at one step. `tensor_key` = xxh3_64(name, seed = run seed).
uint64_t RandomKey(uint64_t tensor_key, uint64_t step);

// A compiled (rule, master, state).
struct Kernel {
  const char* rule;
  const char* master;
  const char* state;
  std::span<const Plane> planes;
  std::span<const Hyper> hypers;
  // Host constants in double, rounded to fp32 once. `hyper` in the order of `hypers`, already multiplied by the
  // tensor's lr_scale and wd_scale; t = this update's number for the tensor, from 1.
  void (*prepare)(std::span<const double> hyper, uint64_t t, float* constants);
  // Updates tiles [first, last) of the tensor; one TileStatistics for each is written to stats[0..last-first).
  void (*update)(const Update& update, uint64_t first, uint64_t last, TileStatistics* stats);
};

// A master format's codec, for loading and serving weights. Elements [first, last), first a multiple of kBlock.
struct Master {
  const char* name;
  std::span<const Plane> planes;
  // Encodes (round to nearest). `in` points at element `first`. Returns false, having stored nothing, if any element is
  // NaN or infinite.
  bool (*load)(std::byte* const* planes, WireIndex format, const void* in, uint64_t first, uint64_t last);
  // Decodes into `format` (round to nearest even). `out` points at element `first`.
  void (*serve)(const std::byte* const* planes, WireIndex format, void* out, uint64_t first, uint64_t last);
};

std::span<const Kernel> Kernels();
std::span<const Master> Masters();
std::span<const WireFormat> WireFormats();
std::span<const char* const> RuleNames();
std::span<const char* const> StateNames();

// nullptr or -1 when there is none.
const Kernel* FindKernel(std::string_view rule, std::string_view master, std::string_view state);
const Master* FindMaster(std::string_view name);
WireIndex FindWireFormat(std::string_view name);

// The lane in use: "scalar", or "scalar, compiled for avx2" where the processor has it. The bits are the same.
const char* LaneName();

}  // namespace ballast::kernels

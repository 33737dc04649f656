// The table of everything the kernels can do: rules (optimizers), master formats, state formats, the triples of them
// that are compiled, and the wire formats. The daemon's validation, planner, help and metrics, the tests and the
// benchmarks all walk these lists. Outside of kernels/, the daemon names only its default formats
// (server/spec/kernel_choice.cc). kernels/NUMERICS.md says what each computes, to the bit.
//
// To add a format: write kernels/formats/NAME.h and name it in kernels/lists.h.
// To add an optimizer: write kernels/rules/NAME.h, name it in kernels/lists.h, and write its oracle in tests/oracle.
//
// Plain functions over caller-owned memory: no allocation, no locks, no I/O. Thread-safe; concurrent updates of one
// tensor must be on disjoint tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ballast::kernels {

// The edition of NUMERICS.md. One more whenever an update of the same state by the same gradient may give other bits.
inline constexpr uint32_t kNumerics = 2;

inline constexpr uint64_t kBlock = 32;   // consecutive elements that share a scale
inline constexpr uint64_t kPad = 256;    // storage is padded to a multiple of this
inline constexpr uint64_t kTile = 4096;  // unit of work and of reduction
constexpr uint64_t TilesOf(uint64_t elements) { return (elements + kTile - 1) / kTile; }
inline constexpr int kMaxPlanes = 6;
inline constexpr int kMaxConstants = 16;

// What a stored array is for; the daemon reports bytes by it.
enum class PlaneKind : uint8_t { kWeights, kMomentum, kVariance, kAverage };
inline constexpr size_t kPlaneKinds = 4;

// One stored array of a tensor: `bytes` bytes for every `per` elements of the padded count.
struct Plane {
  const char* name;
  PlaneKind kind;
  uint32_t bytes;
  uint32_t per;
};
constexpr uint64_t PaddedElements(uint64_t n) { return (n + kPad - 1) / kPad * kPad; }
constexpr uint64_t PlaneBytes(const Plane& p, uint64_t n) { return PaddedElements(n) / p.per * p.bytes; }

// Which of a tensor's own scales multiplies a hyperparameter before prepare() sees it.
enum class ScaledBy : uint8_t { kNothing, kLrScale, kWdScale };

// A hyperparameter of a rule, in the rule's order. Valid: min <= x <= max, and x > min where open_min.
struct Hyper {
  const char* name;
  double value;  // default
  double min, max;
  bool open_min;
  bool open_max;
  ScaledBy scaled_by;
  const char* doc;
};

// The scale factors that travel beside a payload: none, or one fp32 a row of the tensor, or one a tensor.
enum class Scaling : uint8_t { kNone, kRow, kTensor };

struct TileStatistics;

// A number format of payloads: gradients in, weights out.
struct WireFormat {
  const char* name;
  uint32_t bytes;  // per element
  bool gradient;   // fit for gradients and for loading weights
  bool serving;    // fit for serving weights
  Scaling scaling;
  // Where fit for gradients, else nullptr: n elements of `in`, decoded, become the sum (`first`) or are added to it,
  // one rounding to fp32 each. `sum` is aligned as a float is, `in` need not be.
  void (*accumulate)(float* sum, const void* in, uint64_t n, bool first);
  // Where fit for gradients, else nullptr: measures tiles [first, last) of a gradient of n elements, before any
  // clipping. Writes grad_sq, grad_absmax and nonfinite of g = RN(decoded * scale), and 0 for all else, to
  // stats[0..last-first). A block with an element that is not finite adds nothing to grad_sq. The bits are those of the
  // update's statistics, unless the update rejects a block for another reason, or a scale is shared by several blocks,
  // which are then rejected together: it leaves those out.
  void (*measure)(const void* in, uint64_t n, float scale, uint64_t first, uint64_t last, TileStatistics* stats);
};
// Index into WireFormats().
using WireIndex = int;

// How much an update measures. Non-finite elements, rejected blocks and the largest gradient are counted always.
enum class StatisticsLevel : uint8_t { kOff, kCore, kFull };

// Statistics of one tile (kernels/NUMERICS.md, "Statistics"), or of a tensor after Combine. `full` fields are
// filled at steps with full statistics only; all sums are 0 at kOff, and rms_sq for a rule without a second moment.
struct TileStatistics {
  float grad_sq;          // sum g^2
  float update_sq;        // sum d^2, d = wanted update
  float rms_sq;           // sum of the rms terms, of the order of g^2 / vhat
  float grad_absmax;      // max |g| over finite g
  uint32_t nonfinite;     // gradient elements that are NaN or infinite
  uint32_t rejected;      // blocks that kept their old contents
  float weight_sq;        // full: sum x^2 before the update
  float stored_dot;       // full: sum d * (stored after - stored before)
  float hi_dot;           // full: sum d * (first component after - before) of a two-component weight; else stored_dot
  uint32_t unchanged;     // full: elements whose stored weight did not change
  uint32_t hi_unchanged;  // full: elements whose first component did not change; else unchanged
  uint32_t saturated;     // full: state codes at their largest level
};
struct Statistics {
  double grad_sq, update_sq, rms_sq, grad_absmax;
  uint64_t nonfinite, rejected;
  double weight_sq, stored_dot, hi_dot;
  uint64_t unchanged, hi_unchanged, saturated;
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
  // Of a kernel over matrices, else nullptr and 0: PaddedElements(n) numbers, which the first pass writes and the second
  // reads; of how many rows the tensor is; and what `fit` returned.
  float* direction;
  uint64_t rows;
  float least_norm;
  float grad_scale;     // g = RN(decoded * grad_scale)
  float clip;           // at most 1; where it is less, g = RN(RN(decoded * grad_scale) * clip), in the statistics too
  uint64_t random_key;  // RandomKey(...)
  bool stochastic;      // rounding of master and state; false: nearest
  bool dry;             // nothing is stored; the statistics, at most kCore, are those of the update that stores
  StatisticsLevel statistics;
  float constants[kMaxConstants];  // from Kernel::prepare
};

// The curvature along a tensor's last update d (kernels/NUMERICS.md, "Curvature"; arXiv 2506.04805) is taken between
// two updates, from the state as it is stored, the gradient in hand and the one before it, on sampled tiles: number s
// is the tensor's tile s * kCurvatureEvery. For every rule with two moments, u = mhat / p and p = sqrt(vhat) + eps,
//   d = -lr c u  (decay left out; c: what the rule itself holds lr to, 1 but for StableAdamW),  P = diag(p)
//   lr kappa = lr d.(g - g before) / (d.Pd) = -u_dg / (c u_pu)
// to the rounding of each rule: Collage's u is rounded to bf16, here it is not. Each operation is one fp32 rounding:
//   p = fma(sqrt(v), root_debias, eps);  u = RN(RN(m mean_debias) / p)
//   u_dg = sum RN(u RN(g - g before));  u_pu = sum RN(RN(u u) p)
inline constexpr uint64_t kCurvatureEvery = 16;
constexpr uint64_t SampledTiles(uint64_t n) { return (n + kCurvatureEvery * kTile - 1) / (kCurvatureEvery * kTile); }
// What is kept of a gradient from one probe to the next: its sampled tiles, one after the other, whole rows.
constexpr uint64_t SampledElements(uint64_t n) {
  const uint64_t rest = PaddedElements(n) % (kCurvatureEvery * kTile);
  return PaddedElements(n) / (kCurvatureEvery * kTile) * kTile + (rest < kTile ? rest : kTile);
}

// The numbers by which a rule's state after some update becomes that update's u and p.
struct Preconditioner {
  float mean_debias;  // of m
  float root_debias;  // of sqrt(v)
  float eps;
};

// What one tensor is probed with, before its update; pointers are 64-byte aligned. ProbeOf fills in the state.
struct CurvatureProbe {
  const std::byte* momentum[2];  // the planes of m: codes, and scales where the format has them
  const std::byte* variance[2];  // likewise of v
  const void* grad;              // this and the next four as in Update: g is what the update takes
  WireIndex grad_format;
  uint64_t n;
  float grad_scale;
  float clip;
  Preconditioner preconditioner;  // of the update before
  float* before;                  // SampledElements(n): g of the last probe, and then this one's, NaN as infinity
  bool first;                     // nothing is kept yet: g is, and the sums are 0
};

// The sums over one sampled tile, in the order of statistics; and of a tensor after Combine.
struct TileCurvature {
  float u_dg, u_pu;
  uint32_t nonfinite;  // elements left out, since a term of theirs is not finite: the value means nothing
};
struct Curvature {
  double u_dg, u_pu;  // u_pu = 0: nothing was sampled that moved
  uint64_t nonfinite;
};
Curvature Combine(std::span<const TileCurvature> tiles);

// The key of one tensor's random bits at one step, c of kernels/NUMERICS.md, "Random bits". `tensor_key` =
// xxh3_64(name, seed = run seed).
uint64_t RandomKey(uint64_t tensor_key, uint64_t step);

// One step of a running average of a tensor's weights (kernels/NUMERICS.md, "Averages"): a + pull (w - a), w the decoded
// weight. Pointers are 64-byte aligned.
struct Average {
  std::byte* weights[2];  // the master's planes, which are only read
  std::byte* planes[2];   // the average's, in the format AverageMaster()
  uint64_t n;
  uint64_t random_key;  // RandomKey(AverageKey(...), step)
  float pull;           // fp32(1 - decay)
  bool begins;          // it becomes a copy of the weights, rounded to nearest, whatever it was
};
// As a tensor's own key, of the random bits of its average with this decay: a stream apart from the master's.
uint64_t AverageKey(uint64_t tensor_key, double decay);

// A compiled (rule, master, state).
struct Kernel {
  const char* rule;
  const char* master;
  const char* state;
  std::span<const Plane> planes;
  std::span<const Hyper> hypers;
  bool has_rms;  // there is a second moment, so rms_sq means something
  // Host constants in double, rounded to fp32 once. `hyper` in the order of `hypers`, each already multiplied by the
  // tensor's scale that `scaled_by` names; t = this update's number for the tensor, from 1.
  void (*prepare)(std::span<const double> hyper, uint64_t t, float* constants);
  // Rules that take two passes over a tensor (StableAdamW, Muon), else nullptr. The first pass writes to
  // sums[0..last-first) one sum a tile. `finish`, of StableAdamW: turns the sum over the tiles, in index order in double,
  // into the constants that `update` needs.
  void (*measure)(const Update& update, uint64_t first, uint64_t last, float* sums);
  void (*finish)(double sum, uint64_t n, float* constants);
  // Rules over whole matrices (Muon), else nullptr: what the shape does to the constants, once after prepare; returns the
  // least norm that the matrix is divided by. Their first pass writes update.direction, rows of bf16 numbers, and the sums
  // of its squares; who runs it then makes the matrix orthogonal in place (kernels/matrix/newton_schulz.h), and the
  // update takes it.
  float (*fit)(uint64_t rows, uint64_t columns, float* constants);
  // Updates tiles [first, last) of the tensor; one TileStatistics for each is written to stats[0..last-first).
  void (*update)(const Update& update, uint64_t first, uint64_t last, TileStatistics* stats);
  // Where has_rms, else nullptr; the same holds for `curvature`. `hyper` as in prepare; t: the tensor's updates so far,
  // at least 1.
  Preconditioner (*precondition)(std::span<const double> hyper, uint64_t t);
  // Probes sampled tiles [first, last); one TileCurvature for each is written to sums[0..last-first).
  void (*curvature)(const CurvatureProbe& probe, uint64_t first, uint64_t last, TileCurvature* sums);
};
// A probe of a tensor with these planes, for a kernel with `curvature`. The caller fills in everything but the state.
CurvatureProbe ProbeOf(const Kernel& kernel, const std::byte* const* planes);

// A master format's codec, for loading and serving weights. Elements [first, last), first a multiple of kBlock.
struct MasterFormat {
  const char* name;
  std::span<const Plane> planes;
  bool paired;    // a weight is the sum of two components
  float largest;  // magnitude; what is loaded is brought down to it
  // Encodes (round to nearest). `in` points at element `first`. Returns false, having stored nothing, if any element is
  // NaN or infinite. `format` is one with `gradient`.
  bool (*load)(std::byte* const* planes, WireIndex format, const void* in, uint64_t first, uint64_t last);
  // Decodes into `format`, one with `serving` (round to nearest even; finite values saturate). `out` points at element
  // `first`. A format with scales divides by scales[e / row_length] for element e of the tensor: `row_length` is the
  // length of a row for kRow, n for kTensor; both are ignored for kNone.
  void (*encode_weights)(const std::byte* const* planes, WireIndex format, const float* scales, uint64_t row_length,
                         void* out, uint64_t first, uint64_t last);
  // The scale of a row or tensor: the largest |weight| of [first, last), any range; 0 when all are 0.
  float (*absmax)(const std::byte* const* planes, uint64_t first, uint64_t last);
  // Moves tiles [first, last) of an average of these weights.
  void (*average)(const Average& average, uint64_t first, uint64_t last);
};

// A moment's codec in a state format, for import, export and study: does by itself what an update does to a moment. It
// works on whole tensors; planes are padded as the daemon's are. Codes past the end are those of zeros.
struct MomentCodec {
  std::span<const Plane> planes;
  float largest;  // values beyond are refused by encode, and a block that would need one is rejected by update
  // Encodes n values (m, or v itself, not its root). Returns false, having stored nothing, if any is not finite, too
  // large, or negative for a variance. The random bits are those an update with this key would use.
  bool (*encode)(std::byte* const* planes, const float* in, uint64_t n, uint64_t random_key, bool stochastic);
  void (*decode)(const std::byte* const* planes, float* out, uint64_t n);
};
struct MomentFormat {
  const char* name;
  MomentCodec momentum, variance;
};

std::span<const Kernel> Kernels();
std::span<const MasterFormat> MasterFormats();
std::span<const MomentFormat> MomentFormats();
std::span<const WireFormat> WireFormats();
std::span<const char* const> RuleNames();
// The format that averages are kept in: a master format, of two planes.
const MasterFormat& AverageMaster();

// These find an entry by name; nullptr or -1: there is none.
const Kernel* FindKernel(std::string_view rule, std::string_view master, std::string_view state);
const MasterFormat* FindMasterFormat(std::string_view name);
const MomentFormat* FindMomentFormat(std::string_view name);
WireIndex FindWireFormat(std::string_view name);

// The instruction set in use, the widest this processor has: scalar, avx2 or avx512. All give the same bits.
const char* IsaName();

}  // namespace ballast::kernels

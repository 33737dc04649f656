#include "client/python/core/numerics.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "client/python/core/interpreter_lock.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/registry.h"

namespace ballast {
namespace {

namespace nb = nanobind;

using Address = uintptr_t;
using Addresses = std::vector<Address>;
using kernels::Kernel;

constexpr Address kAlignment = 64;

template <typename T>
T* At(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename T>
const T& Entry(std::span<const T> all, size_t index) {
  if (index >= all.size()) throw nb::index_error("no such entry in the registry");
  return all[index];
}

using Pointers = std::array<std::byte*, kernels::kMaxPlanes>;

Pointers PlanePointers(const Addresses& planes, size_t wanted) {
  if (planes.size() != wanted) throw nb::value_error("the number of planes is not that of the format");
  Pointers pointers{};
  for (size_t i = 0; i < planes.size(); ++i) {
    if (planes[i] % kAlignment != 0) throw nb::value_error("a plane is not aligned to 64 bytes");
    pointers[i] = At<std::byte>(planes[i]);
  }
  return pointers;
}

// --- the tables -----------------------------------------------------------------------------------------------------

nb::list Describe(std::span<const kernels::Plane> planes) {
  nb::list all;
  for (const kernels::Plane& plane : planes) all.append(nb::make_tuple(plane.name, plane.bytes, plane.per));
  return all;
}

nb::list Describe(std::span<const kernels::Hyper> hypers) {
  nb::list all;
  for (const kernels::Hyper& h : hypers) {
    nb::dict one;
    one["name"] = h.name;
    one["default"] = h.value;
    one["min"] = h.min;
    one["max"] = h.max;
    one["open_min"] = h.open_min;
    one["open_max"] = h.open_max;
    one["doc"] = h.doc;
    all.append(one);
  }
  return all;
}

nb::list DescribeKernels() {
  nb::list all;
  for (const Kernel& kernel : kernels::Kernels()) {
    nb::dict one;
    one["rule"] = kernel.rule;
    one["master"] = kernel.master;
    one["state"] = kernel.state;
    one["planes"] = Describe(kernel.planes);
    one["hypers"] = Describe(kernel.hypers);
    one["has_rms"] = kernel.has_rms;
    one["passes"] = kernel.measure == nullptr ? 1 : 2;
    one["over_matrix"] = kernel.fit != nullptr;
    all.append(one);
  }
  return all;
}

nb::list DescribeStates() {
  nb::list all;
  for (const kernels::MomentFormat& state : kernels::MomentFormats()) {
    nb::dict one;
    one["name"] = state.name;
    one["momentum"] = Describe(state.momentum.planes);
    one["variance"] = Describe(state.variance.planes);
    one["largest_momentum"] = state.momentum.largest;
    one["largest_variance"] = state.variance.largest;
    all.append(one);
  }
  return all;
}

nb::list DescribeWireFormats() {
  constexpr const char* kScalings[] = {"none", "row", "tensor"};
  nb::list all;
  for (const kernels::WireFormat& wire : kernels::WireFormats()) {
    nb::dict one;
    one["name"] = wire.name;
    one["bytes"] = wire.bytes;
    one["gradient"] = wire.gradient;
    one["serving"] = wire.serving;
    one["scaling"] = kScalings[static_cast<size_t>(wire.scaling)];
    all.append(one);
  }
  return all;
}

// Everything that is compiled; a position in a list is the index that the functions below take.
nb::dict Registry() {
  nb::list masters;
  for (const kernels::MasterFormat& master : kernels::MasterFormats()) {
    nb::dict one;
    one["name"] = master.name;
    one["planes"] = Describe(master.planes);
    masters.append(one);
  }
  nb::dict all;
  all["isa"] = kernels::IsaName();
  all["pad"] = kernels::kPad;
  all["kernels"] = DescribeKernels();
  all["masters"] = masters;
  all["states"] = DescribeStates();
  all["wires"] = DescribeWireFormats();
  return all;
}

// --- the update -----------------------------------------------------------------------------------------------------

// What a call of `update` is of, besides the planes.
struct Job {
  const Kernel& kernel;
  kernels::Update update;
  std::vector<double> hyper;
  uint64_t t;
};

kernels::Statistics Run(Job& job) {
  const uint64_t tiles = (job.update.n + kernels::kTile - 1) / kernels::kTile;
  std::vector<kernels::TileStatistics> stats(tiles);
  kernels::Update& u = job.update;
  job.kernel.prepare(job.hyper, job.t, u.constants);
  std::vector<float> direction;
  if (job.kernel.fit != nullptr) {
    direction.resize(kernels::PaddedElements(u.n));
    u.direction = direction.data();
    u.least_norm = job.kernel.fit(u.rows, u.n / u.rows, u.constants);
  }
  if (job.kernel.measure != nullptr) {
    std::vector<float> sums(tiles);
    job.kernel.measure(u, 0, tiles, sums.data());
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (job.kernel.finish != nullptr) job.kernel.finish(sum, u.n, u.constants);
    if (job.kernel.fit != nullptr) {
      kernels::OrthogonalizeAlone(u.rows, u.n / u.rows, sum, u.least_norm, u.direction);
    }
  }
  job.kernel.update(u, 0, tiles, stats.data());
  return kernels::Combine(stats, job.update.statistics == kernels::StatisticsLevel::kFull);
}

nb::dict Describe(const kernels::Statistics& s) {
  nb::dict all;
  all["grad_sq"] = s.grad_sq;
  all["update_sq"] = s.update_sq;
  all["rms_sq"] = s.rms_sq;
  all["grad_absmax"] = s.grad_absmax;
  all["nonfinite"] = s.nonfinite;
  all["rejected"] = s.rejected;
  all["weight_sq"] = s.weight_sq;
  all["stored_dot"] = s.stored_dot;
  all["hi_dot"] = s.hi_dot;
  all["unchanged"] = s.unchanged;
  all["hi_unchanged"] = s.hi_unchanged;
  all["saturated"] = s.saturated;
  all["full"] = s.full;
  return all;
}

nb::dict Update(size_t kernel_index, const Addresses& planes, Address grad, size_t grad_format, uint64_t n,
                uint64_t rows, float grad_scale, const std::vector<double>& hyper, uint64_t t, uint64_t random_key,
                bool stochastic, uint32_t statistics) {
  const Kernel& kernel = Entry(kernels::Kernels(), kernel_index);
  if (hyper.size() != kernel.hypers.size()) throw nb::value_error("the number of hyperparameters is not the rule's");
  if (!Entry(kernels::WireFormats(), grad_format).gradient) throw nb::value_error("not a gradient's format");
  if (kernel.fit != nullptr && (rows == 0 || n % rows != 0)) throw nb::value_error("not so many rows");
  const Pointers pointers = PlanePointers(planes, kernel.planes.size());
  Job job{.kernel = kernel, .update = {}, .hyper = hyper, .t = t};
  job.update.grad = At<const void>(grad);
  job.update.grad_format = static_cast<kernels::WireIndex>(grad_format);
  job.update.n = n;
  job.update.rows = rows;
  job.update.grad_scale = grad_scale;
  job.update.clip = 1;
  job.update.random_key = random_key;
  job.update.stochastic = stochastic;
  job.update.statistics = static_cast<kernels::StatisticsLevel>(std::min(statistics, 2u));
  std::copy(pointers.begin(), pointers.end(), job.update.planes);
  kernels::Statistics result;
  {
    const LockFreed unlocked;
    result = Run(job);
  }
  return Describe(result);
}

// --- the codecs -----------------------------------------------------------------------------------------------------

bool Load(size_t master_index, const Addresses& planes, size_t format, Address in, uint64_t n) {
  const kernels::MasterFormat& master = Entry(kernels::MasterFormats(), master_index);
  if (!Entry(kernels::WireFormats(), format).gradient) throw nb::value_error("not a format that weights load from");
  const Pointers pointers = PlanePointers(planes, master.planes.size());
  return master.load(pointers.data(), static_cast<kernels::WireIndex>(format), At<const void>(in), 0, n);
}

void Serve(size_t master_index, const Addresses& planes, size_t format, Address scales, uint64_t row_length,
           Address out, uint64_t n) {
  const kernels::MasterFormat& master = Entry(kernels::MasterFormats(), master_index);
  if (!Entry(kernels::WireFormats(), format).serving) throw nb::value_error("not a serving format");
  const Pointers pointers = PlanePointers(planes, master.planes.size());
  master.encode_weights(pointers.data(), static_cast<kernels::WireIndex>(format), At<const float>(scales), row_length,
                        At<void>(out), 0, n);
}

float AbsMax(size_t master_index, const Addresses& planes, uint64_t first, uint64_t last) {
  const kernels::MasterFormat& master = Entry(kernels::MasterFormats(), master_index);
  return master.absmax(PlanePointers(planes, master.planes.size()).data(), first, last);
}

const kernels::MomentCodec& Slot(size_t state, bool variance) {
  const kernels::MomentFormat& found = Entry(kernels::MomentFormats(), state);
  return variance ? found.variance : found.momentum;
}

bool EncodeSlot(size_t state, bool variance, const Addresses& planes, Address in, uint64_t n, uint64_t random_key,
                bool stochastic) {
  const kernels::MomentCodec& codec = Slot(state, variance);
  const Pointers pointers = PlanePointers(planes, codec.planes.size());
  return codec.encode(pointers.data(), At<const float>(in), n, random_key, stochastic);
}

void DecodeSlot(size_t state, bool variance, const Addresses& planes, Address out, uint64_t n) {
  const kernels::MomentCodec& codec = Slot(state, variance);
  codec.decode(PlanePointers(planes, codec.planes.size()).data(), At<float>(out), n);
}

uint64_t TensorKey(const std::string& name, uint64_t seed) {
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

}  // namespace

void BindNumerics(nb::module_& module) {
  using nb::arg;
  nb::module_ numerics = module.def_submodule("numerics", "The registry of the daemon's kernels.");
  numerics.def("registry", &Registry);
  numerics.def("update", &Update, arg("kernel"), arg("planes"), arg("grad"), arg("grad_format"), arg("n"), arg("rows"),
               arg("grad_scale"), arg("hyper"), arg("t"), arg("random_key"), arg("stochastic"), arg("statistics"));
  numerics.def("load", &Load, arg("master"), arg("planes"), arg("format"), arg("source"), arg("n"));
  numerics.def("serve", &Serve, arg("master"), arg("planes"), arg("format"), arg("scales"), arg("row_length"),
               arg("target"), arg("n"));
  numerics.def("absmax", &AbsMax, arg("master"), arg("planes"), arg("first"), arg("last"));
  numerics.def("encode_slot", &EncodeSlot, arg("state"), arg("variance"), arg("planes"), arg("source"), arg("n"),
               arg("random_key"), arg("stochastic"));
  numerics.def("decode_slot", &DecodeSlot, arg("state"), arg("variance"), arg("planes"), arg("target"), arg("n"));
  numerics.def("random_key", &kernels::RandomKey, arg("tensor_key"), arg("step"));
  numerics.def("tensor_key", &TensorKey, arg("name"), arg("seed"));
}

}  // namespace ballast

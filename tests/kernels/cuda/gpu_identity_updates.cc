// Updates: batches of tensors, in the same layout in host memory and on the GPU, stepped on both.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "tests/kernels/adversarial.h"
#include "tests/kernels/cuda/gpu_identity.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kSteps = 3;
constexpr StatisticsLevel kLevels[] = {StatisticsLevel::kFull, StatisticsLevel::kOff, StatisticsLevel::kCore};
constexpr std::array kLevelNames = {"off", "core", "full"};  // in the enumeration's order
constexpr float kGradScales[] = {1.0f, 0.37f, 1.0f / 3.0f};
constexpr float kClips[] = {1.0f, 0.3f};
constexpr std::byte kGuardByte{0xA5}, kUnwritten{0xEE};

// Elements of a batch's tensors. Some tensors have none.
using Sizes = std::vector<uint64_t>;

enum class Input { kOrdinary, kAdversarial, kNarrow };
constexpr std::array kInputNames = {"ordinary", "adversarial", "narrow"};

struct Case {
  size_t kernel;
  WireIndex format;
  bool stochastic;
  Input input;
  bool mixed;             // each tensor of the batch has a gradient format, a rounding and statistics of its own
  bool ordinary = false;  // every update is (IsOrdinary); else statistics alternate
};

std::string TitleOf(const Case& c) {
  std::string name = NameOf(Kernels()[c.kernel]);
  const std::string input = std::string(" ") + kInputNames[static_cast<size_t>(c.input)];
  if (c.mixed) return name + " mixed" + input;
  return name + " gradients " + NameOf(c.format) + (c.stochastic ? " stochastic" : " nearest") + input +
         (c.ordinary ? ", all of them ordinary updates" : "");
}

// Where each tensor's elements begin, counted through with whole rows, and after the last their sum.
std::vector<uint64_t> Starts(const Sizes& sizes) {
  std::vector<uint64_t> starts = {0};
  for (const uint64_t n : sizes) starts.push_back(starts.back() + PaddedElements(n));
  return starts;
}

// Payloads for all tensors of a batch, made once each; past every tensor's end all bits are set: NaN.
class Gradients {
 public:
  Gradients(const Sizes& sizes, const Stream& stream) : sizes_(sizes), starts_(Starts(sizes)), stream_(stream) {}

  struct Pointers {
    const std::byte *host, *device;
  };
  Pointers Of(size_t tensor, WireIndex format, Input input, uint64_t t) {
    const Twin& all = All(format, input, t);
    const uint64_t at = starts_[tensor] * WireFormats()[static_cast<size_t>(format)].bytes;
    return {all.host() + at, all.device() + at};
  }

 private:
  const Twin& All(WireIndex format, Input input, uint64_t t) {
    const auto key = std::make_tuple(format, input, t);
    if (const auto known = made_.find(key); known != made_.end()) return known->second;
    const uint64_t total = starts_.back(), bytes = WireFormats()[static_cast<size_t>(format)].bytes;
    const Payload payload = Encoded(format, input == Input::kAdversarial ? Adversarial(t, total)
                                            : input == Input::kNarrow    ? Narrow(t, total)
                                                                         : Normals(t).Vector(total, 1e-3));
    Twin all(total * bytes, std::byte{0xff});
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const uint64_t at = starts_[i] * bytes;
      std::memcpy(all.host() + at, payload.bytes.data() + at, sizes_[i] * bytes);
    }
    all.Upload(stream_);
    return made_.emplace(key, std::move(all)).first->second;
  }

  const Sizes& sizes_;
  const std::vector<uint64_t> starts_;
  const Stream& stream_;
  std::map<std::tuple<WireIndex, Input, uint64_t>, Twin> made_;
};

// Where a batch's arrays lie.
struct Places {
  Places(const Kernel& kernel, const Sizes& sizes) {
    for (const uint64_t n : sizes) {
      auto& at = planes.emplace_back();
      for (size_t p = 0; p < kernel.planes.size(); ++p) at[p] = states.Add(PlaneBytes(kernel.planes[p], n));
      statistics.push_back(figures.Add(TilesOf(n) * sizeof(TileStatistics)));
      sums.push_back(figures.Add(TilesOf(n) * sizeof(float)));
      if (kernel.fit != nullptr) directions.push_back(matrices.Add(PaddedElements(n) * sizeof(float)));
    }
  }
  Layout states, figures, matrices;
  std::vector<std::array<uint64_t, kMaxPlanes>> planes;
  std::vector<uint64_t> statistics, sums, directions;
};

class Batch {
 public:
  Batch(const Case& c, const Sizes& sizes, Gradients* gradients, const Stream& stream, Findings* findings)
      : case_(c),
        kernel_(Kernels()[c.kernel]),
        sizes_(sizes),
        gradients_(*gradients),
        stream_(stream),
        findings_(*findings),
        places_(kernel_, sizes),
        states_(places_.states.size(), kGuardByte),
        directions_(places_.matrices.size(), kUnwritten) {
    for (size_t i = 0; i < sizes.size(); ++i) SetWeights(i);
    states_.Upload(stream);
  }

  // Whether all bits were the same. In a mixed batch an update that is only tried comes first.
  bool Step(uint64_t t) { return (!case_.mixed || Run(t, /*dry=*/true)) && Run(t, /*dry=*/false); }

 private:
  bool Run(uint64_t t, bool dry) {
    dry_ = dry;
    Twin figures(places_.figures.size(), kUnwritten);
    figures.Upload(stream_);
    std::vector<DeviceUpdate> batch;
    uint64_t tiles = 0;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      batch.push_back(OnDevice(i, t, tiles, figures.device()));
      tiles += TilesOf(sizes_[i]);
    }
    const DeviceArray device_batch = Uploaded(batch, stream_);
    if (kernel_.fit != nullptr) {
      directions_.Upload(stream_);
      Check(CudaKernels()[case_.kernel].direct(device_batch.as<DeviceUpdate>(), static_cast<int>(batch.size()), tiles,
                                               stream_.get()),
            "first pass of " + TitleOf(case_));
    }
    const bool ordinary = std::ranges::all_of(batch, [](const DeviceUpdate& item) { return IsOrdinary(item.update); });
    Check(CudaKernels()[case_.kernel].update(device_batch.as<DeviceUpdate>(), static_cast<int>(batch.size()), tiles,
                                             ordinary, stream_.get()),
          "update of " + TitleOf(case_));
    std::vector<Update> wanted;
    for (size_t i = 0; i < sizes_.size(); ++i) wanted.push_back(OnHost(i, t, figures.host()));
    stream_.Wait("update of " + TitleOf(case_));
    return SameConstants(t, wanted, Downloaded<DeviceUpdate>(device_batch, stream_)) && SameFigures(t, figures) &&
           SameDirections(t) && SameStates(t);
  }

  std::string Where(uint64_t t, size_t i) const {
    return TitleOf(case_) + (dry_ ? ", dry" : "") + ", step " + std::to_string(t) + ", tensor " + std::to_string(i) +
           " of " + std::to_string(sizes_[i]) + " elements";
  }

  void SetWeights(size_t i) {
    std::byte* planes[kMaxPlanes] = {};
    for (size_t p = 0; p < kernel_.planes.size(); ++p) {
      planes[p] = states_.host() + places_.planes[i][p];
      std::memset(planes[p], 0, PlaneBytes(kernel_.planes[p], sizes_[i]));
    }
    if (sizes_[i] == 0) return;
    const std::vector<float> weights = Normals(i + 1).Vector(sizes_[i], case_.input == Input::kAdversarial ? 1 : 0.02);
    FindMasterFormat(kernel_.master)->load(planes, FindWireFormat("fp32"), weights.data(), 0, sizes_[i]);
  }

  // All but the pointers.
  Update Asked(size_t i, uint64_t t) const {
    static const std::vector<WireIndex> formats = GradientFormats();
    Update u{};
    u.grad_format = case_.mixed ? formats[i % formats.size()] : case_.format;
    u.n = sizes_[i];
    u.grad_scale = kGradScales[(t + i) % 3];
    u.clip = kClips[(t + i) % 2];
    u.random_key = RandomKey(1000 + i, t);
    u.stochastic = case_.mixed ? i / 4 % 2 == 0 : case_.stochastic;
    u.statistics = kLevels[(t + (case_.mixed ? i : case_.stochastic)) % 3];
    if (case_.ordinary) u.statistics = StatisticsLevel::kCore;
    if (dry_) u.statistics = std::min(u.statistics, StatisticsLevel::kCore);
    u.dry = dry_;
    kernel_.prepare(DefaultHypers(kernel_), t, u.constants);
    return u;
  }
  void SetPlanes(size_t i, std::byte* states, Update* u) const {
    for (size_t p = 0; p < kernel_.planes.size(); ++p) u->planes[p] = states + places_.planes[i][p];
  }
  // Directions are taken as they are: gpu_identity_matrices.cc makes them orthogonal.
  void SetDirection(size_t i, std::byte* directions, Update* u) const {
    if (kernel_.fit == nullptr) return;
    u->direction = reinterpret_cast<float*>(directions + places_.directions[i]);
    u->rows = 1;
    u->least_norm = kernel_.fit(1, std::max<uint64_t>(u->n, 1), u->constants);
  }
  DeviceUpdate OnDevice(size_t i, uint64_t t, uint64_t first_tile, std::byte* figures) const {
    DeviceUpdate item{.update = Asked(i, t), .first_tile = first_tile, .tiles = nullptr, .sums = nullptr};
    SetPlanes(i, states_.device(), &item.update);
    SetDirection(i, directions_.device(), &item.update);
    item.update.grad = gradients_.Of(i, item.update.grad_format, case_.input, t).device;
    item.tiles = reinterpret_cast<TileStatistics*>(figures + places_.statistics[i]);
    item.sums = reinterpret_cast<float*>(figures + places_.sums[i]);
    return item;
  }
  // Done on the CPU at once; returns it with the constants it was done with.
  Update OnHost(size_t i, uint64_t t, std::byte* figures) {
    Update u = Asked(i, t);
    SetPlanes(i, states_.host(), &u);
    SetDirection(i, directions_.host(), &u);
    u.grad = gradients_.Of(i, u.grad_format, case_.input, t).host;
    auto* statistics = reinterpret_cast<TileStatistics*>(figures + places_.statistics[i]);
    auto* sums = reinterpret_cast<float*>(figures + places_.sums[i]);
    const uint64_t tiles = TilesOf(u.n);
    if (kernel_.measure != nullptr) {
      kernel_.measure(u, 0, tiles, sums);
      double sum = 0;
      for (uint64_t tile = 0; tile < tiles; ++tile) sum += static_cast<double>(sums[tile]);
      if (kernel_.finish != nullptr) kernel_.finish(sum, u.n, u.constants);
    }
    kernel_.update(u, 0, tiles, statistics);
    uint64_t rejected = 0;
    for (uint64_t tile = 0; tile < tiles; ++tile) rejected += statistics[tile].rejected;
    findings_.Compared(u.n);
    findings_.Updated((u.n + kBlock - 1) / kBlock, rejected);
    return u;
  }

  bool SameConstants(uint64_t t, const std::vector<Update>& wanted, const std::vector<DeviceUpdate>& got) {
    bool same = true;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const auto* cpu = reinterpret_cast<const std::byte*>(wanted[i].constants);
      const auto* gpu = reinterpret_cast<const std::byte*>(got[i].update.constants);
      same = findings_.Same(cpu, gpu, sizeof wanted[i].constants, sizeof(float), [&](uint64_t at) {
        return Where(t, i) + ", constant " + std::to_string(at);
      }) && same;
    }
    return same;
  }

  // Statistics and sums, and what lies between them.
  bool SameFigures(uint64_t t, const Twin& figures) {
    const std::vector<std::byte> got = figures.Downloaded(stream_);
    if (std::memcmp(got.data(), figures.host(), got.size()) == 0) return true;
    bool same = true;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const uint64_t tiles = TilesOf(sizes_[i]), statistics = places_.statistics[i], sums = places_.sums[i];
      const auto level = kLevelNames[static_cast<size_t>(Asked(i, t).statistics)];
      same = findings_.Same(figures.host() + statistics, got.data() + statistics, tiles * sizeof(TileStatistics), 4,
                            [&](uint64_t word) {
                              const uint64_t fields = sizeof(TileStatistics) / 4;
                              return Where(t, i) + ", statistics " + level + ", tile " + std::to_string(word / fields) +
                                     ", field " + std::to_string(word % fields);
                            }) &&
             same;
      same = findings_.Same(figures.host() + sums, got.data() + sums, tiles * sizeof(float), 4, [&](uint64_t tile) {
        return Where(t, i) + ", first pass, sum of tile " + std::to_string(tile);
      }) && same;
    }
    if (same) findings_.Differ(Where(t, 0) + ": the GPU wrote between arrays of statistics");
    return false;
  }

  bool SameDirections(uint64_t t) {
    if (kernel_.fit == nullptr) return true;
    const std::vector<std::byte> got = directions_.Downloaded(stream_);
    return findings_.Same(directions_.host(), got.data(), got.size(), sizeof(float),
                          [&](uint64_t word) { return Where(t, 0) + ", direction " + std::to_string(word); });
  }

  bool SameStates(uint64_t t) {
    const std::vector<std::byte> got = states_.Downloaded(stream_);
    if (std::memcmp(got.data(), states_.host(), got.size()) == 0) return true;
    bool same = true;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      for (size_t p = 0; p < kernel_.planes.size(); ++p) {
        const Plane& plane = kernel_.planes[p];
        const uint64_t at = places_.planes[i][p];
        same = findings_.Same(states_.host() + at, got.data() + at, PlaneBytes(plane, sizes_[i]), plane.bytes,
                              [&](uint64_t word) {
                                return Where(t, i) + ", plane " + std::to_string(p) + " (" + plane.name +
                                       "), element " + std::to_string(word * plane.per);
                              }) &&
               same;
      }
    }
    if (same) findings_.Differ(Where(t, 0) + ": an update wrote between planes");
    return false;
  }

  const Case case_;
  const Kernel& kernel_;
  const Sizes& sizes_;
  Gradients& gradients_;
  const Stream& stream_;
  Findings& findings_;
  const Places places_;
  Twin states_, directions_;
  bool dry_ = false;  // the update in hand
};

// The first step that differs is the last of its case: what follows from it says nothing new.
void CompareCase(const Case& c, const Sizes& sizes, Gradients* gradients, const Stream& stream, Findings* findings) {
  Batch batch(c, sizes, gradients, stream, findings);
  const uint64_t rejected = findings->rejected();
  uint64_t t = 1;
  while (t <= kSteps && batch.Step(t)) ++t;
  if (c.input == Input::kOrdinary)
    findings->Expect(findings->rejected() == rejected, TitleOf(c) + ": no block should be rejected");
}

void CompareKernel(size_t kernel, const Extent& extent, const Sizes& sizes, Gradients* gradients, const Stream& stream,
                   Findings* findings) {
  for (const bool stochastic : {false, true}) {
    const WireIndex bf16 = FindWireFormat("bf16");
    CompareCase({kernel, bf16, stochastic, Input::kNarrow, false, true}, sizes, gradients, stream, findings);
  }
  for (const Input input : {Input::kOrdinary, Input::kAdversarial}) {
    CompareCase({kernel, 0, true, input, true}, sizes, gradients, stream, findings);
    if (extent.reduced) continue;
    for (const WireIndex format : GradientFormats()) {
      for (const bool stochastic : {false, true}) {
        CompareCase({kernel, format, stochastic, input, false}, sizes, gradients, stream, findings);
      }
    }
  }
}

}  // namespace

void CompareUpdates(const Extent& extent, const Stream& stream, Findings* findings) {
  const Sizes all = {0, 1, 0, 31, 257, 4096, 4097, 9192, 255, 40000, 12345, 200003, 0};
  const Sizes few = {0, 257, 0, 4097, 100, 33, 1, 5000, 0};
  const Sizes& sizes = extent.reduced ? few : all;
  Gradients gradients(sizes, stream);
  for (size_t k = 0; k < Kernels().size(); ++k) {
    CompareKernel(k, extent, sizes, &gradients, stream, findings);
  }
  findings->Expect(findings->rejected() > 0, "adversarial gradients have some blocks rejected");
  findings->Expect(findings->rejected() * 5 < findings->blocks(), "most blocks are not rejected");
}

// More tensors in a batch than a model has, and tensors of more tiles than a GPU has warps.
void CompareManyTensors(const Extent& extent, const Stream& stream, Findings* findings) {
  Sizes many, large = {(uint64_t{1} << 23) + 77, 3, (uint64_t{1} << 20) + 1};
  for (uint64_t i = 0; i < (extent.reduced ? 10001 : 12000); ++i) many.push_back(i * 37 % 97);
  Gradients some(many, stream), few(large, stream);
  for (const char* rule : {"adamw", "stable_adamw"}) {
    const auto kernel = static_cast<size_t>(FindKernel(rule, "split24", "companded8") - Kernels().data());
    CompareCase({kernel, FindWireFormat("bf16"), true, Input::kAdversarial, !extent.reduced}, many, &some, stream,
                findings);
    if (extent.reduced) continue;
    CompareCase({kernel, FindWireFormat("bf16"), true, Input::kOrdinary, false}, large, &few, stream, findings);
  }
}

}  // namespace ballast::kernels

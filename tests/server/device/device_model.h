// A model of one kernel on a device, for tests and benchmarks that hold one device against another. Thread-compatible.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "proto/checksum.h"

#include "server/device/device.h"
#include "tests/normals.h"
#include "tests/server/device/matrix_room.h"

namespace ballast::testing {

// The first that is registered.
inline const kernels::Kernel& KernelOfRule(std::string_view rule) {
  const auto all = kernels::Kernels();
  return *std::find_if(all.begin(), all.end(), [&](const kernels::Kernel& k) { return rule == k.rule; });
}

// Tensors of one kernel on a device, in buffers as a run has them: all planes of a kind in one, gradients in a pool.
class Model {
 public:
  Model(Device* device, const kernels::Kernel& kernel, std::vector<uint64_t> sizes)
      : kernel_(kernel), sizes_(std::move(sizes)) {
    uint64_t largest = 0, pool = 0;
    for (const uint64_t n : sizes_) {
      std::vector<DeviceBuffer> planes;
      for (const kernels::Plane& plane : kernel.planes) {
        planes.push_back(
            device->Allocate(std::max<uint64_t>(kernels::PlaneBytes(plane, n), 64), Place::kDevice).value());
      }
      planes_.push_back(std::move(planes));
      scales_.push_back(device->Allocate(sizeof(float) * (n + 1), Place::kDevice).value());
      largest = std::max(largest, n);
      at_.push_back(pool);
      pool += (n * sizeof(float) + 63) / 64 * 64;
    }
    pool_ = device->Allocate(pool + 64, Place::kHost).value();
    tiles_.resize(kernels::TilesOf(largest) + 1);
    queue_ =
        device->NewQueue({.tiles = kernels::TilesOf(largest), .payload_bytes = 4 * kPiece, .scales = kPiece}).value();
  }
  ~Model() { queue_->WaitIdle(); }

  void Load() {
    loaded_.resize(sizes_.size());
    for (size_t i = 0; i < sizes_.size(); ++i) {
      loaded_[i] = NormalValues(i, 1, sizes_[i]);
      for (uint64_t first = 0; first < sizes_[i]; first += kPiece) {
        queue_->Submit(
            LoadTask{.master = master(),
                     .planes = MasterPlanes(i),
                     .format = kernels::FindWireFormat("fp32"),
                     .first = first,
                     .last = std::min(sizes_[i], first + kPiece),
                     .in = reinterpret_cast<const std::byte*>(loaded_[i].data() + first)},
            [this](const TaskResult& r) { finite_ = finite_ && r.finite; }, Name(i));
      }
    }
  }
  // How the updates from now on are asked for.
  struct Asked {
    kernels::StatisticsLevel statistics = kernels::StatisticsLevel::kFull;
    bool stochastic = true;
    const char* gradients = "fp32";  // or bf16, but for sums
  };
  void Ask(const Asked& asked) {
    queue_->WaitIdle();
    asked_ = asked;
  }
  // Updates every tensor with gradients of its own and keeps the statistics.
  void Step(uint64_t t) {
    Fill(t);
    UpdateAll(t, /*measured=*/false);
  }
  // Likewise, but every gradient is measured first.
  void JudgedStep(uint64_t t) {
    Fill(t);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      queue_->Submit(
          MeasureTask{.gradient = pool_.data() + at_[i],
                      .format = Gradients(),
                      .elements = sizes_[i],
                      .scale = 1,
                      .tiles = tiles_.data()},
          [this](const TaskResult& r) { statistics_.push_back(r.statistics); }, Name(i));
    }
    UpdateAll(t, /*measured=*/true);
  }
  // Likewise, but every gradient is the sum of two ranks', made just before its update.
  void SummedStep(uint64_t t) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      SubmitSum(i, MakeSum(i, t));
      UpdateOne(i, t, /*measured=*/false);
    }
  }
  // Likewise, but made by the update.
  void JoinedStep(uint64_t t) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      GradientSums sums;
      sums.push_back(MakeSum(i, t));
      UpdateBySums(i, t, std::move(sums));
    }
  }
  // Likewise, but in parts, and each other tensor's gradient is what one rank has sent; all made before the update comes.
  void ApartStep(uint64_t t) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      SubmitParts(i, t);
      queue_->WaitIdle();
      UpdateOne(i, t, /*measured=*/false);
    }
  }
  // Likewise, but made by the update, with which they come.
  void BroughtStep(uint64_t t) {
    for (size_t i = 0; i < sizes_.size(); ++i) UpdateBySums(i, t, MakeParts(i, t));
  }
  // Likewise, but made by the device in memory of its own, where the update finds them.
  void ThereStep(uint64_t t) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      for (SumTask& part : MakeParts(i, t)) {
        part.on_device = true;
        SubmitSum(i, std::move(part));
      }
      UpdateOne(i, t, /*measured=*/true);
    }
  }
  // Likewise, but they wait when the update comes, among others'.
  void WaitingStep(uint64_t t) {
    Held([&] {
      for (size_t i = 0; i < sizes_.size(); ++i) {
        SubmitParts(i, t);
        if (i > 0) UpdateOne(i - 1, t, /*measured=*/false);
      }
      UpdateOne(sizes_.size() - 1, t, /*measured=*/false);
    });
  }
  // Submits what `submit` does while the device does nothing; then waits for it.
  void Held(absl::FunctionRef<void()> submit) {
    absl::Notification held, go;
    queue_->Submit(SumTask{}, [&](const TaskResult&) {
      held.Notify();
      go.WaitForNotification();
    });
    held.WaitForNotification();
    submit();
    go.Notify();
    queue_->WaitIdle();
  }
  // As Step, but each tensor's weights go out, in bf16, just behind its update.
  void ServedStep(uint64_t t) {
    Fill(t);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      UpdateOne(i, t, /*measured=*/false);
      EncodeTensor(i, "bf16", 24);
    }
  }
  // Likewise in int8 with one scale.
  void ScaledStep(uint64_t t) {
    Fill(t);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      UpdateOne(i, t, /*measured=*/false);
      EncodeTensor(i, "int8-tensor", sizes_[i]);
    }
  }
  size_t sums() const { return sums_; }
  void Fill(uint64_t t) {
    queue_->WaitIdle();  // the pool's bytes are free
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const std::vector<float> values = NormalValues(100 * t + i, 0.1f, sizes_[i]);
      const size_t bytes = kernels::WireFormats()[static_cast<size_t>(Gradients())].bytes;
      for (uint64_t e = 0; e < sizes_[i]; ++e) {
        const uint32_t bits = std::bit_cast<uint32_t>(values[e]) >> (32 - 8 * bytes);  // bf16: the upper half
        std::memcpy(pool_.data() + at_[i] + e * bytes, &bits, bytes);
      }
    }
  }
  void UpdateAll(uint64_t t, bool measured) {
    for (size_t i = 0; i < sizes_.size(); ++i) UpdateOne(i, t, measured);
  }
  void UpdateOne(size_t i, uint64_t t, bool measured) {
    UpdateTask task = MakeUpdate(i, t);
    task.there = measured;
    queue_->Submit(
        task, [this](const TaskResult& r) { statistics_.push_back(r.statistics); }, Name(i));
  }
  void EncodeWeights(std::string_view format, uint64_t row_length) {
    for (size_t i = 0; i < sizes_.size(); ++i) EncodeTensor(i, format, row_length);
  }
  void EncodeTensor(size_t i, std::string_view format, uint64_t row_length) {
    if (sizes_[i] == 0) return;
    const kernels::WireIndex wire = kernels::FindWireFormat(format);
    const bool scaled = kernels::WireFormats()[static_cast<size_t>(wire)].scaling != kernels::Scaling::kNone;
    const uint64_t row = sizes_[i] % row_length == 0 ? row_length : sizes_[i];
    float* const scales = reinterpret_cast<float*>(scales_[i].data());
    if (scaled) {
      queue_->Submit(
          ScaleTask{.master = master(),
                    .planes = MasterPlanes(i),
                    .elements = sizes_[i],
                    .row_length = row,
                    .scales = scales},
          [](const TaskResult&) {}, Name(i));
    }
    for (uint64_t first = 0; first < sizes_[i]; first += kPiece) {
      const uint64_t last = std::min(sizes_[i], first + kPiece);
      Piece& piece = served_.emplace_back();
      piece.name = absl::StrCat("tensor ", i, " in ", std::string(format), " from element ", first);
      piece.data.resize((last - first) * kernels::WireFormats()[static_cast<size_t>(wire)].bytes);
      if (scaled) piece.scales.resize((last - 1) / row + 1 - first / row);
      piece.sealed = served_.size() % 2 == 0;
      queue_->Submit(
          EncodeWeightsTask{.master = master(),
                            .planes = MasterPlanes(i),
                            .format = wire,
                            .first = first,
                            .last = last,
                            .out = piece.data.data(),
                            .scales = scaled ? scales : nullptr,
                            .row_length = row,
                            .scales_out = piece.scales.data(),
                            .crc32c = piece.sealed ? &piece.crc32c : nullptr},
          [](const TaskResult&) {}, Name(i));
    }
  }
  void WaitIdle() { queue_->WaitIdle(); }

  struct Piece {
    std::string name;
    std::vector<std::byte> data;
    std::vector<float> scales;
    bool sealed = false;  // its checksum was wanted
    uint32_t crc32c = 0;
    bool operator==(const Piece&) const = default;
  };
  const std::deque<Piece>& served() const { return served_; }
  // Whether those pieces have their checksums whose were wanted.
  bool sealed_well() const {
    return std::ranges::all_of(
        served_, [](const Piece& p) { return p.crc32c == (p.sealed ? Crc32c(absl::MakeConstSpan(p.data)) : 0); });
  }
  const std::vector<kernels::Statistics>& statistics() const { return statistics_; }
  bool finite() const { return finite_; }  // whether all was that was loaded
  DeviceQueue* queue() { return queue_.get(); }
  SumTask MakeSum(size_t i, uint64_t t) { return MakePart(i, t, 0, sizes_[i], /*adds=*/true); }
  // Of elements [first, last): of two ranks, or what one has sent.
  SumTask MakePart(size_t i, uint64_t t, uint64_t first, uint64_t last, bool adds) {
    SumTask sum{.to = pool_.data() + at_[i] + first * sizeof(float),
                .elements = last - first,
                .format = kernels::FindWireFormat("fp32"),
                .adds = adds,
                .first = true};
    for (uint64_t rank = 0; rank < (adds ? 2 : 1); ++rank) {
      const std::vector<float> values = NormalValues(100 * t + 10 * i + rank, 0.1f, sizes_[i]);
      const auto bytes =
          absl::MakeConstSpan(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
      const auto part = bytes.subspan(first * sizeof(float), (last - first) * sizeof(float));
      std::string payload(part.begin(), part.end());
      sum.terms.push_back({.payload = Payload(std::move(payload)), .first = 0, .last = last - first});
    }
    return sum;
  }
  GradientSums MakeParts(size_t i, uint64_t t) {
    GradientSums parts;
    for (uint64_t first = 0; first < sizes_[i]; first += kPiece) {
      parts.push_back(MakePart(i, t, first, std::min(sizes_[i], first + kPiece), i % 2 == 0));
    }
    return parts;
  }
  void SubmitSum(size_t i, SumTask sum) {
    queue_->Submit(
        std::move(sum), [this](const TaskResult&) { ++sums_; }, Name(i));
  }
  void SubmitParts(size_t i, uint64_t t) {
    for (SumTask& part : MakeParts(i, t)) SubmitSum(i, std::move(part));
  }
  void UpdateBySums(size_t i, uint64_t t, GradientSums sums) {
    UpdateTask task = MakeUpdate(i, t);
    task.sums = std::make_shared<GradientSums>(std::move(sums));
    queue_->Submit(
        std::move(task), [this](const TaskResult& r) { statistics_.push_back(r.statistics); }, Name(i));
  }
  // Where it is summed.
  absl::Span<float> Gradient(size_t i) {
    return {reinterpret_cast<float*>(pool_.data() + at_[i]), static_cast<size_t>(sizes_[i])};
  }
  UpdateTask MakeUpdate(size_t i, uint64_t t) {
    UpdateTask task{.kernel = &kernel_, .tiles = tiles_.data()};
    for (size_t p = 0; p < planes_[i].size(); ++p) task.update.planes[p] = planes_[i][p].data();
    task.update.grad = pool_.data() + at_[i];
    task.update.grad_format = Gradients();
    task.update.n = sizes_[i];
    task.update.grad_scale = 1;
    task.update.clip = 1;
    task.update.random_key = kernels::RandomKey(i, t);
    task.update.stochastic = asked_.stochastic;
    task.update.statistics = asked_.statistics;
    std::vector<double> hyper;
    for (const kernels::Hyper& h : kernel_.hypers) hyper.push_back(h.value);
    kernel_.prepare(hyper, t, task.update.constants);
    rooms_[i].Give(&task);
    return task;
  }

 private:
  static constexpr uint64_t kPiece = 2 * kernels::kTile;
  kernels::WireIndex Gradients() const { return kernels::FindWireFormat(asked_.gradients); }
  static uint32_t Name(size_t i) { return static_cast<uint32_t>(i); }
  const kernels::MasterFormat* master() const { return kernels::FindMasterFormat(kernel_.master); }
  std::array<std::byte*, kernels::kMaxPlanes> MasterPlanes(size_t i) {
    std::array<std::byte*, kernels::kMaxPlanes> planes = {};
    for (size_t p = 0; p < master()->planes.size(); ++p) planes[p] = planes_[i][p].data();
    return planes;
  }

  const kernels::Kernel& kernel_;
  const std::vector<uint64_t> sizes_;
  std::vector<std::vector<DeviceBuffer>> planes_;
  std::vector<DeviceBuffer> scales_;
  std::vector<uint64_t> at_;
  std::vector<MatrixRoom> rooms_ = std::vector<MatrixRoom>(sizes_.size());
  DeviceBuffer pool_;
  std::vector<kernels::TileStatistics> tiles_;
  std::vector<std::vector<float>> loaded_;
  std::deque<Piece> served_;
  std::vector<kernels::Statistics> statistics_;
  Asked asked_;
  size_t sums_ = 0;
  bool finite_ = true;
  std::unique_ptr<DeviceQueue> queue_;
};

// A model trained and served on a device: steps of each kind, updates asked for in each way, weights in formats of each
// kind after every step.
struct TrainOutcome {
  std::deque<Model::Piece> served;
  std::vector<kernels::Statistics> statistics;
  bool finite = false;
};
// summed: its steps of gradients that are sums.
inline TrainOutcome TrainOn(Device* device, const kernels::Kernel& kernel,
                            void (Model::*summed)(uint64_t t) = &Model::SummedStep) {
  Model model(device, kernel, {30000, 1, 0, 256, 4096, 5000, 33, 9216});
  model.Load();
  struct Step {
    void (Model::*take)(uint64_t t);
    Model::Asked asked;
  };
  constexpr auto kCore = kernels::StatisticsLevel::kCore, kFull = kernels::StatisticsLevel::kFull;
  uint64_t t = 0;
  for (const Step& step :
       {Step{&Model::Step, {.statistics = kFull}}, Step{&Model::JudgedStep, {.statistics = kCore, .gradients = "bf16"}},
        Step{summed, {.statistics = kFull, .stochastic = false}},
        Step{&Model::Step, {.statistics = kCore, .stochastic = false}}, Step{summed, {.statistics = kCore}},
        Step{&Model::ServedStep, {.statistics = kCore}}, Step{&Model::ScaledStep, {.statistics = kFull}}}) {
    model.Ask(step.asked);
    (model.*step.take)(++t);
    for (const char* format : {"fp32", "bf16", "fp8-e4m3", "int8-row", "int8-tensor"}) model.EncodeWeights(format, 24);
  }
  model.WaitIdle();
  return {model.served(), model.statistics(), model.finite()};
}

// The first difference in words, or nothing.
inline std::string WhatDiffers(const TrainOutcome& wanted, const TrainOutcome& got) {
  const auto all = [](const kernels::Statistics& s) {
    return std::tuple(s.grad_sq, s.update_sq, s.rms_sq, s.grad_absmax, s.nonfinite, s.rejected, s.weight_sq,
                      s.stored_dot, s.hi_dot, s.unchanged, s.hi_unchanged, s.saturated, s.full);
  };
  if (!wanted.finite || !got.finite) return "a load met what is not finite";
  if (wanted.statistics.size() != got.statistics.size()) {
    return absl::StrCat(got.statistics.size(), " tasks were answered of ", wanted.statistics.size());
  }
  if (wanted.served.size() != got.served.size()) {
    return absl::StrCat(got.served.size(), " pieces were served of ", wanted.served.size());
  }
  for (size_t i = 0; i < wanted.served.size(); ++i) {
    if (wanted.served[i] != got.served[i]) return absl::StrCat("piece ", i, ", ", wanted.served[i].name);
  }
  for (size_t i = 0; i < wanted.statistics.size(); ++i) {
    if (all(wanted.statistics[i]) != all(got.statistics[i])) return absl::StrCat("statistics of answer ", i);
  }
  return "";
}

}  // namespace ballast::testing

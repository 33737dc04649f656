#include "server/device/device_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/device/cpu_device.h"
#include "server/spec/run_spec.h"

namespace ballast {
namespace {

constexpr uint64_t kElements = kernels::kTile + 300;  // two tiles, the last row short

// How one update is made. Judged: as in a staged step that clips and probes.
struct Step {
  std::string_view format;
  bool stochastic = false;
  kernels::StatisticsLevel statistics = kernels::StatisticsLevel::kFull;
  bool judged = false;
};
constexpr Step kSteps[] = {
    {.format = "fp32", .stochastic = true},
    {.format = "bf16", .statistics = kernels::StatisticsLevel::kCore, .judged = true},
    {.format = "bf16", .stochastic = true, .statistics = kernels::StatisticsLevel::kCore, .judged = true}};

// What a device makes of a kernel's tensor.
struct DeviceBits {
  std::vector<float> weights, average;
  std::vector<kernels::Statistics> statistics;
  std::vector<kernels::Curvature> curvatures;
};

// Values of several magnitudes, the same every time.
float Value(uint64_t i) {
  return static_cast<float>(std::sin(static_cast<double>(i)) * std::exp2(-(static_cast<double>(i % 11))));
}

// One tensor of a kernel on a device, and what came of its tasks.
class Subject {
 public:
  Subject(Device* device, const kernels::Kernel& kernel)
      : device_(device), kernel_(kernel), master_(kernels::FindMasterFormat(kernel.master)) {
    for (const kernels::Hyper& h : kernel.hypers) hyper_.push_back(h.value);
  }
  ~Subject() {
    if (queue_ != nullptr) queue_->WaitIdle();
  }
  absl::Status Reserve();
  void Load();
  void Take(const Step& step, uint64_t t);
  // UNAVAILABLE: some tasks were never done.
  absl::StatusOr<DeviceBits> Served();

 private:
  void Fill(const Step& step, uint64_t t);
  void Judge(const UpdateTask& update, uint64_t t);
  void MoveAverage(uint64_t t);
  void Serve(const kernels::MasterFormat& master, const std::array<std::byte*, kernels::kMaxPlanes>& planes,
             std::vector<float>* out);
  void Submit(const UpdateTask& update) {
    ++submitted_;
    queue_->Submit(update, [this](const TaskResult& r) { bits_.statistics.push_back(r.statistics); });
  }

  Device* const device_;
  const kernels::Kernel& kernel_;
  const kernels::MasterFormat* const master_;
  std::vector<double> hyper_;
  std::array<DeviceBuffer, kernels::kMaxPlanes> buffers_;
  std::array<std::byte*, kernels::kMaxPlanes> planes_ = {};
  DeviceBuffer gradient_, before_;
  std::array<kernels::TileStatistics, 2> tiles_;
  std::array<kernels::TileCurvature, 1> sampled_tiles_;
  DeviceBuffer average_[2];
  std::vector<float> loaded_ = std::vector<float>(kElements);
  DeviceBits bits_;
  size_t submitted_ = 0;  // whose statistics are due
  bool probed_ = false;
  std::unique_ptr<DeviceQueue> queue_;
};

absl::Status Subject::Reserve() {
  constexpr uint64_t kBytes = kElements * sizeof(float);
  for (size_t p = 0; p < kernel_.planes.size(); ++p) {
    ASSIGN_OR_RETURN(buffers_[p], device_->Allocate(kernels::PlaneBytes(kernel_.planes[p], kElements), Place::kDevice));
    planes_[p] = buffers_[p].data();
  }
  ASSIGN_OR_RETURN(gradient_, device_->Allocate(kBytes, Place::kHost));
  ASSIGN_OR_RETURN(before_, device_->Allocate(kernels::SampledElements(kElements) * sizeof(float), Place::kDevice));
  const auto planes = kernels::AverageMaster().planes;
  for (size_t p = 0; p < std::size(average_); ++p) {
    ASSIGN_OR_RETURN(average_[p], device_->Allocate(kernels::PlaneBytes(planes[p], kElements), Place::kDevice));
  }
  ASSIGN_OR_RETURN(queue_, device_->NewQueue({.tiles = 2, .payload_bytes = kBytes, .averages = true}));
  return absl::OkStatus();
}

void Subject::Load() {
  for (uint64_t i = 0; i < kElements; ++i) loaded_[i] = Value(i);
  queue_->Submit(LoadTask{.master = master_,
                          .planes = planes_,
                          .format = kernels::FindWireFormat("fp32"),
                          .first = 0,
                          .last = kElements,
                          .in = reinterpret_cast<const std::byte*>(loaded_.data())},
                 [](const TaskResult&) {});
}

void Subject::Fill(const Step& step, uint64_t t) {
  queue_->WaitIdle();  // the gradient before is read
  const uint64_t bytes = WireBytes(kernels::FindWireFormat(step.format));
  for (uint64_t i = 0; i < kElements; ++i) {
    const auto word =
        std::bit_cast<uint32_t>(Value(7 * i + 3 * t) * 0.01f) >> (32 - 8 * bytes);  // bf16: the upper half
    std::memcpy(gradient_.data() + i * bytes, &word, bytes);
  }
}

void Subject::Take(const Step& step, uint64_t t) {
  Fill(step, t);
  UpdateTask task{.kernel = &kernel_, .tiles = tiles_.data(), .there = step.judged};
  std::copy(planes_.begin(), planes_.end(), task.update.planes);
  task.update.grad = gradient_.data();
  task.update.grad_format = kernels::FindWireFormat(step.format);
  task.update.n = kElements;
  task.update.grad_scale = 1;
  task.update.clip = step.judged ? 0.5f : 1;
  task.update.random_key = kernels::RandomKey(1, t);
  task.update.stochastic = step.stochastic;
  task.update.statistics = step.statistics;
  kernel_.prepare(hyper_, t, task.update.constants);
  if (step.judged) Judge(task, t);
  Submit(task);
  MoveAverage(t);
}

// Measures the gradient, probes the curvature and tries the update dry, ahead of the update.
void Subject::Judge(const UpdateTask& update, uint64_t t) {
  ++submitted_;
  queue_->Submit(MeasureTask{.gradient = gradient_.data(),
                             .format = update.update.grad_format,
                             .elements = kElements,
                             .scale = 1,
                             .tiles = tiles_.data()},
                 [this](const TaskResult& r) { bits_.statistics.push_back(r.statistics); });
  if (kernel_.curvature != nullptr) {
    CurvatureTask task{.kernel = &kernel_,
                       .probe = kernels::ProbeOf(kernel_, planes_.data()),
                       .tiles = sampled_tiles_.data(),
                       .there = true};
    task.probe.grad = update.update.grad;
    task.probe.grad_format = update.update.grad_format;
    task.probe.n = kElements;
    task.probe.grad_scale = update.update.grad_scale;
    task.probe.clip = update.update.clip;
    task.probe.before = reinterpret_cast<float*>(before_.data());
    task.probe.first = !std::exchange(probed_, true);
    task.probe.preconditioner = kernel_.precondition(hyper_, t - 1);
    queue_->Submit(task, [this](const TaskResult& r) { bits_.curvatures.push_back(r.curvature); });
  }
  UpdateTask tried = update;
  tried.update.dry = true;
  tried.update.statistics = kernels::StatisticsLevel::kCore;
  Submit(tried);
}

void Subject::MoveAverage(uint64_t t) {
  AverageTask task{.master = master_, .first = 0, .last = kElements};
  std::copy_n(planes_.begin(), std::size(task.average.weights), task.average.weights);
  for (size_t p = 0; p < std::size(average_); ++p) task.average.planes[p] = average_[p].data();
  task.average.n = kElements;
  task.average.random_key = kernels::RandomKey(kernels::AverageKey(1, 0.99), t);
  task.average.pull = 0.01f;
  task.average.begins = t == 1;
  queue_->Submit(task, [](const TaskResult&) {});
}

void Subject::Serve(const kernels::MasterFormat& master, const std::array<std::byte*, kernels::kMaxPlanes>& planes,
                    std::vector<float>* out) {
  out->resize(kElements);
  queue_->Submit(EncodeWeightsTask{.master = &master,
                                   .planes = planes,
                                   .format = kernels::FindWireFormat("fp32"),
                                   .first = 0,
                                   .last = kElements,
                                   .out = reinterpret_cast<std::byte*>(out->data())},
                 [](const TaskResult&) {});
}

absl::StatusOr<DeviceBits> Subject::Served() {
  Serve(*master_, planes_, &bits_.weights);
  Serve(kernels::AverageMaster(), {average_[0].data(), average_[1].data()}, &bits_.average);
  queue_->WaitIdle();
  if (bits_.statistics.size() == submitted_) return std::move(bits_);
  return absl::UnavailableError(absl::StrCat(device_->label(), " does not answer"));
}

absl::StatusOr<DeviceBits> BitsOn(Device* device, const kernels::Kernel& kernel) {
  Subject subject(device, kernel);
  RETURN_IF_ERROR(subject.Reserve());
  subject.Load();
  uint64_t t = 0;
  for (const Step& step : kSteps) subject.Take(step, ++t);
  return subject.Served();
}

std::string NameOf(const kernels::Kernel& k) { return absl::StrCat(k.rule, " ", k.master, " ", k.state); }

bool Same(const kernels::Statistics& a, const kernels::Statistics& b) {
  const auto all = [](const kernels::Statistics& s) {
    return std::tuple(s.grad_sq, s.update_sq, s.rms_sq, s.grad_absmax, s.nonfinite, s.rejected, s.weight_sq,
                      s.stored_dot, s.hi_dot, s.unchanged, s.hi_unchanged, s.saturated);
  };
  return all(a) == all(b);
}

bool SameCurvature(const kernels::Curvature& a, const kernels::Curvature& b) {
  return std::tuple(a.u_dg, a.u_pu, a.nonfinite) == std::tuple(b.u_dg, b.u_pu, b.nonfinite);
}

// The first kind of result that differs, or nothing.
std::string WhatDiffers(const DeviceBits& a, const DeviceBits& b) {
  if (std::memcmp(a.weights.data(), b.weights.data(), kElements * sizeof(float)) != 0) return "weights";
  if (std::memcmp(a.average.data(), b.average.data(), kElements * sizeof(float)) != 0) return "averages";
  if (!std::ranges::equal(a.statistics, b.statistics, Same)) return "statistics";
  return std::ranges::equal(a.curvatures, b.curvatures, SameCurvature) ? "" : "curvatures";
}

}  // namespace

absl::Status CheckDevice(Device* device) {
  CpuDevice cpu({.threads = 1});
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    if (kernel.fit != nullptr) continue;  // its bits are a library's
    ASSIGN_OR_RETURN(const DeviceBits wanted, BitsOn(&cpu, kernel));
    ASSIGN_OR_RETURN(const DeviceBits got, BitsOn(device, kernel));
    const std::string other = WhatDiffers(wanted, got);
    if (other.empty()) continue;
    return absl::DataLossError(
        absl::StrCat(device->label(), " gives other ", other, " than the CPU: ", NameOf(kernel)));
  }
  return absl::OkStatus();
}

}  // namespace ballast

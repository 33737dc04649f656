#include "server/device_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/cpu_device.h"
#include "server/status_macros.h"

namespace ballast {
namespace {

constexpr uint64_t kElements = kernels::kTile + 300;  // two tiles, the last row short
constexpr uint64_t kSteps = 2;

// What a device makes of a kernel's tensor.
struct Outcome {
  std::vector<float> weights;
  std::vector<kernels::Statistics> statistics;
};

// Values of several magnitudes, the same every time.
float Value(uint64_t i) {
  return static_cast<float>(std::sin(static_cast<double>(i)) * std::exp2(-(static_cast<double>(i % 11))));
}

absl::StatusOr<Outcome> OutcomeOn(Device* device, const kernels::Kernel& kernel) {
  const kernels::Master* const master = kernels::FindMaster(kernel.master);
  const kernels::WireIndex fp32 = kernels::FindWireFormat("fp32");
  constexpr uint64_t kBytes = kElements * sizeof(float);
  std::array<DeviceBuffer, kernels::kMaxPlanes> planes;
  UpdateTask update{.kernel = &kernel};
  LoadTask load{.master = master, .format = fp32, .first = 0, .last = kElements};
  for (size_t p = 0; p < kernel.planes.size(); ++p) {
    ASSIGN_OR_RETURN(planes[p], device->Allocate(kernels::PlaneBytes(kernel.planes[p], kElements), Place::kDevice));
    update.update.planes[p] = planes[p].data();
    if (p < master->planes.size()) load.planes[p] = planes[p].data();
  }
  ASSIGN_OR_RETURN(const DeviceBuffer gradient, device->Allocate(kBytes, Place::kHost));
  ASSIGN_OR_RETURN(const auto queue, device->NewQueue({.tiles = 2, .payload_bytes = kBytes}));

  Outcome outcome{.weights = std::vector<float>(kElements)};
  std::vector<float> values(kElements);
  for (uint64_t i = 0; i < kElements; ++i) {
    values[i] = Value(i);
    reinterpret_cast<float*>(gradient.data())[i] = Value(7 * i + 3) * 0.01f;
  }
  load.in = reinterpret_cast<const std::byte*>(values.data());
  queue->Submit(load, [](const TaskResult&) {});

  std::array<kernels::TileStatistics, 2> tiles;
  std::vector<double> hyper;
  for (const kernels::Hyper& h : kernel.hypers) hyper.push_back(h.value);
  update.tiles = tiles.data();
  update.update.grad = gradient.data();
  update.update.grad_format = fp32;
  update.update.n = kElements;
  update.update.grad_scale = 1;
  update.update.clip = 1;
  update.update.stochastic = true;
  update.update.statistics = kernels::StatisticsLevel::kFull;
  for (uint64_t t = 1; t <= kSteps; ++t) {
    update.update.random_key = kernels::RandomKey(1, t);
    kernel.prepare(hyper, t, update.update.constants);
    queue->Submit(update, [&](const TaskResult& r) { outcome.statistics.push_back(r.statistics); });
  }
  queue->Submit(ServeTask{.master = master,
                          .planes = load.planes,
                          .format = fp32,
                          .first = 0,
                          .last = kElements,
                          .out = reinterpret_cast<std::byte*>(outcome.weights.data())},
                [](const TaskResult&) {});
  queue->WaitIdle();
  if (outcome.statistics.size() == kSteps) return outcome;
  return absl::UnavailableError(absl::StrCat(device->label(), " does not answer"));
}

std::string NameOf(const kernels::Kernel& k) { return absl::StrCat(k.rule, " ", k.master, " ", k.state); }

bool Same(const kernels::Statistics& a, const kernels::Statistics& b) {
  const auto all = [](const kernels::Statistics& s) {
    return std::tuple(s.grad_sq, s.update_sq, s.rms_sq, s.grad_absmax, s.nonfinite, s.rejected, s.weight_sq,
                      s.stored_dot, s.hi_dot, s.unchanged, s.hi_unchanged, s.saturated);
  };
  return all(a) == all(b);
}

}  // namespace

absl::Status CheckDevice(Device* device) {
  CpuDevice cpu({.threads = 1});
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    ASSIGN_OR_RETURN(const Outcome wanted, OutcomeOn(&cpu, kernel));
    ASSIGN_OR_RETURN(const Outcome got, OutcomeOn(device, kernel));
    if (std::memcmp(wanted.weights.data(), got.weights.data(), kElements * sizeof(float)) != 0) {
      return absl::DataLossError(absl::StrCat(device->label(), " gives other weights than the CPU: ", NameOf(kernel)));
    }
    if (!std::equal(wanted.statistics.begin(), wanted.statistics.end(), got.statistics.begin(), Same)) {
      return absl::DataLossError(
          absl::StrCat(device->label(), " gives other statistics than the CPU: ", NameOf(kernel)));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast

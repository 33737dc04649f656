// How fast the CPU's threads update the tensors of a model: AdamW of the default recipe, its state in memory and not in caches
// where the tensors are large in all. Nothing is sent. growth.py asks it.
//
//   cpu_device_bench THREADS TENSORS ELEMENTS ROUNDS
//   < SECONDS...
//
// ELEMENTS: of each tensor. SECONDS: of each of the ROUNDS, after one that does not count; a round updates all tensors once.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "server/device/cpu_device.h"

namespace ballast::bench {
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "cpu_device_bench: %s\n", what.c_str());
  std::exit(1);
}

uint64_t Parse(const char* text) {
  uint64_t value;
  if (!absl::SimpleAtoi(text, &value) || value == 0) Die(absl::StrCat("'", text, "' is no number from 1 on"));
  return value;
}

class Model {
 public:
  Model(Device* device, uint64_t tensors, uint64_t elements)
      : kernel_(*kernels::FindKernel("adamw", "split24", "companded8")),
        tensors_(tensors),
        elements_(elements),
        tiles_(kernels::TilesOf(elements)),
        queue_(device->NewQueue({.tiles = tiles_.size()}).value()) {
    for (const kernels::Plane& plane : kernel_.planes) {
      strides_.push_back((kernels::PlaneBytes(plane, elements) + 63) / 64 * 64);
      planes_.push_back(device->Allocate(tensors * strides_.back(), Place::kDevice).value());
    }
    gradients_ = device->Allocate(tensors * elements * sizeof(float), Place::kHost).value();
    auto* const gradient = reinterpret_cast<float*>(gradients_.data());
    for (uint64_t e = 0; e < tensors * elements; ++e) gradient[e] = 1e-3f * static_cast<float>(e % 1021);
    for (const kernels::Hyper& hyper : kernel_.hypers) hyper_.push_back(hyper.value);
  }

  void Update(uint64_t step) {
    for (uint64_t i = 0; i < tensors_; ++i) {
      queue_->Enqueue(
          Task(i, step), [](const TaskResult&) {}, static_cast<uint32_t>(i));
    }
    queue_->WaitIdle();
  }

 private:
  UpdateTask Task(uint64_t tensor, uint64_t step) {
    UpdateTask task{.kernel = &kernel_, .tiles = tiles_.data()};
    for (size_t p = 0; p < planes_.size(); ++p) task.update.planes[p] = planes_[p].data() + tensor * strides_[p];
    task.update.grad = gradients_.data() + tensor * elements_ * sizeof(float);
    task.update.grad_format = kernels::FindWireFormat("fp32");
    task.update.n = elements_;
    task.update.grad_scale = task.update.clip = 1;
    task.update.random_key = kernels::RandomKey(tensor, step);
    task.update.stochastic = true;
    task.update.statistics = kernels::StatisticsLevel::kCore;
    kernel_.prepare(hyper_, step, task.update.constants);
    return task;
  }

  const kernels::Kernel& kernel_;
  const uint64_t tensors_, elements_;
  std::vector<kernels::TileStatistics> tiles_;
  std::vector<uint64_t> strides_;
  std::vector<DeviceBuffer> planes_;
  DeviceBuffer gradients_;
  std::vector<double> hyper_;
  std::unique_ptr<DeviceQueue> queue_;
};

int Main(int argc, char** argv) {
  if (argc != 5) Die("usage: cpu_device_bench THREADS TENSORS ELEMENTS ROUNDS");
  CpuDevice device({.threads = static_cast<uint32_t>(Parse(argv[1]))});
  Model model(&device, Parse(argv[2]), Parse(argv[3]));
  const uint64_t rounds = Parse(argv[4]);
  model.Update(1);
  for (uint64_t round = 1; round <= rounds; ++round) {
    const auto began = std::chrono::steady_clock::now();
    model.Update(1 + round);
    std::printf("%.9f\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return 0;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
